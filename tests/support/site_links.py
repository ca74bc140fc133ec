"""Links of a site that pdoc made: those from page to page, which are Markdown files, lead to the
modules that include these.

    python tests/support/site_links.py build/docs MODULE...
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from os.path import relpath
from pathlib import Path

ROOT = Path(__file__).parents[2]
INCLUDE = re.compile(r"^\.\. include:: (\S+)$", re.MULTILINE)
LINK = re.compile(r'href="([^":#]+\.md)(#[^"]*)?"')


def pages_of(module: str) -> list[Path]:
    """The Markdown files that a module's documentation includes."""
    path = module.replace(".", "/")
    places = [ROOT / where / path / "__init__.py" for where in ("", "examples")]
    for source in (*places, ROOT / f"{path}.py"):
        if source.exists():
            included = INCLUDE.findall(source.read_text())
            return [(source.parent / name).resolve() for name in included]
    return []


def lead_on(site: Path, modules: Iterable[str]) -> list[str]:
    """Mend the links of the site; returns those of pages that no module includes."""
    pages = {name: pages_of(name) for name in modules}
    html_of = {name: site / f"{name.replace('.', '/')}.html" for name in pages}
    homes = {page: html_of[name] for name, found in pages.items() for page in found}
    lost: list[str] = []
    for name, included in pages.items():
        html = html_of[name]

        def other(match: re.Match[str], html: Path = html, included: list[Path] = included) -> str:
            target, anchor = match[1], match[2] or ""
            for page in included:
                if home := homes.get((page.parent / target).resolve()):
                    return f'href="{relpath(home, html.parent)}{anchor}"'
            lost.append(f"{html.relative_to(site)}: {target}")
            return match[0]

        html.write_text(LINK.sub(other, html.read_text()))
    return lost


if __name__ == "__main__":
    for link in lead_on(Path(sys.argv[1]), sys.argv[2:]):
        print(f"docs: no page for {link}", file=sys.stderr)
