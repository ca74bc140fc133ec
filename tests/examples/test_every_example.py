"""What holds for each example that a user runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
MOST_LINES = 149
HELPERS = {"curves", "group_norm", "launch", "llama", "text_corpus"}
HELPERS |= {"token_shift", "torchtitan_attention"}
RUN = sorted(
    path
    for path in (ROOT / "examples").glob("*.py")
    if 'if __name__ == "__main__":' in path.read_text()
)


def test_the_others_are_helpers() -> None:
    names = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert names - {path.stem for path in RUN} == HELPERS


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_it_is_short_and_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    tree = ast.parse(text)
    assert f"python examples/{path.name}" in (ast.get_docstring(tree) or "")
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in ("main", "parse"):
            assert ast.get_docstring(node), f"{node.name} says nothing about itself"


def test_readme_lists_each() -> None:
    section = (ROOT / "README.md").read_text().split("\n## Examples\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)\.py` \|", section, re.MULTILINE)
    assert sorted(listed) == [path.stem for path in RUN]
