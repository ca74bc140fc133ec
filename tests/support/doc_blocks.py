"""The pages of the documentation, and the code in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```(python|py|sh)\n(.*?)```(?:\n+```text\n(.*?)```)?", re.DOTALL)
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "examples/benchmark/README.md",
    *sorted(
        str(page.relative_to(ROOT))
        for folder in ("annotations", "customized_ops")
        for page in (ROOT / folder).rglob("docs/*.md")
    ),
)


def blocks(kind: str) -> list[tuple[str, str | None]]:
    """The blocks marked so, each with the text that stands below it."""
    texts = [(ROOT / page).read_text() for page in PAGES]
    return [(code, out or None) for t in texts for k, code, out in BLOCK.findall(t) if k == kind]


def diff_of(framework: str) -> list[str]:
    """The lines of the diff in a section of the page about frameworks."""
    page = (ROOT / "customized_ops/ring_attention/docs/frameworks.md").read_text()
    section = page.split(f"\n## {framework}\n")[1].split("\n## ")[0]
    return section.split("```diff\n")[1].split("```")[0].splitlines()
