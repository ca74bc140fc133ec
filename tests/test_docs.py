"""Every Python block of the documentation runs, and prints what stands below it.

Those that need ranks or a model of the reader's are in ``test_doc_fragments.py``.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import importlib.util
import io
import pkgutil
import re
from pathlib import Path

import numpy as np
import pytest
import site_links
from doc_blocks import PAGES, ROOT, blocks
from PIL import Image
from plans import draw_pictures

import annotations
import customized_ops

LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
# Blocks that take longest have this in them.
SLOW = "Qwen3NextForCausalLM"
NUMBERS = [
    pytest.param(n, marks=[pytest.mark.slow] * (SLOW in code))
    for n, (code, _) in enumerate(blocks("python"))
]


@pytest.mark.parametrize("number", NUMBERS)
def test_block_runs_and_prints_what_it_says(number: int) -> None:
    code, output = blocks("python")[number]
    if "from transformers import" in code:
        pytest.importorskip("transformers", reason="transformers is not installed: '.[hf]'")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, f"block {number}", "exec"), {"__name__": f"readme_{number}"})
    assert output is None or said.getvalue() == output


def test_there_are_blocks() -> None:
    assert len(blocks("python")) >= 3
    assert sum(output is not None for _, output in blocks("python")) >= 3


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in LINK.findall((ROOT / page).read_text()):
        assert ((ROOT / page).parent / link).exists(), f"{page}: {link}"


def test_pictures_are_those_that_the_example_draws(tmp_path: Path) -> None:
    drawn = set(draw_pictures.pictures())
    shown = {Path(link).name for p in PAGES for link in LINK.findall((ROOT / p).read_text())}
    measured = {"packed_speed.png"}  # by examples/benchmark/parts/planning/packed_speed.py --plot
    assert {name for name in shown if name.endswith(".png")} == drawn | measured
    name = min(drawn)
    draw_pictures.draw(name, tmp_path)
    new, old = (Image.open(at / name) for at in (tmp_path, draw_pictures.PAGES))
    assert new.size == old.size
    different = np.asarray(new.convert("L"), int) - np.asarray(old.convert("L"), int)
    assert (abs(different) > 64).mean() < 0.01


def test_pages_of_the_api_are_made() -> None:
    pdoc = pytest.importorskip("pdoc", reason="pip install '.[docs]'")
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    modules = re.search(r"^MODULES := (.*)$", makefile, re.MULTILINE)
    assert modules is not None
    made = {name: pdoc.doc.Module.from_name(name) for name in modules[1].split()}
    plan = pdoc.render.html_module(made["customized_ops.ring_attention.core.plan"], made)
    assert "#what-moves" in plan and "data:image/png" in plan
    for module, name in (("", "wrap_ring_attn_func"), (".api.yunchang", "LongContextAttention")):
        module = f"customized_ops.ring_attention{module}"
        assert name in pdoc.render.html_module(made[module], made)


def test_links_of_the_site_lead_somewhere(tmp_path: Path) -> None:
    """Those from page to page, by the modules that include the pages."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    modules = re.search(r"^MODULES := (.*)$", makefile, re.MULTILINE)
    assert modules is not None
    names = modules[1].split()
    for name in names:
        html = tmp_path / f"{name.replace('.', '/')}.html"
        html.parent.mkdir(parents=True, exist_ok=True)
        pages = [page.read_text() for page in site_links.pages_of(name)]
        targets = re.findall(r"\]\(([^):]+\.md(?:#[^)]*)?)\)", "".join(pages))
        html.write_text("".join(f'<a href="{target}">' for target in targets))
    assert site_links.lead_on(tmp_path, names) == []
    for html in tmp_path.rglob("*.html"):
        for target in re.findall(r'href="([^"#]+)', html.read_text()):
            assert (html.parent / target).exists(), f"{html}: {target}"


def test_readme_shows_an_example_by_line_30() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert "```python" in lines[:30]
    assert "make demo" in "\n".join(lines[:15])
    assert "make test" in "\n".join(lines[:15])


def sources() -> dict[str, str]:
    """The text of each module that can be imported here, by name."""
    found = {}
    for package in (annotations, customized_ops):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if (lacks := needs(module.name)) is None or importlib.util.find_spec(lacks):
                spec = module.module_finder.find_spec(module.name)  # type: ignore[call-arg]
                found[module.name] = Path(spec.origin).read_text()  # type: ignore[union-attr, arg-type]
    return found


def needs(name: str) -> str | None:
    """What a module is written in, or for, if that is optional."""
    if name.endswith((".merge.triton_kernels", ".merge.launch", ".signals.flag_kernels")):
        return "triton"
    return "nnscaler" if name.startswith("annotations.engines.nnscaler") else None


def test_each_module_says_what_it_is() -> None:
    found = sources()
    assert len(found) > 300
    for name in found:
        assert importlib.import_module(name).__doc__, f"{name} says nothing about itself"


@pytest.mark.parametrize("name", [name for name, text in sources().items() if ">>>" in text])
def test_docstring_examples(name: str) -> None:
    examples = doctest.testmod(importlib.import_module(name))
    assert examples.failed == 0 and examples.attempted > 0
