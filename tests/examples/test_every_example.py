"""What holds for each example that a user runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
MOST_LINES = 149
HELPERS = {f"shared/{name}" for name in ("curves", "launch", "llama", "text_corpus")}
HELPERS |= {"shared/torchtitan_attention", "own_ops/group_norm", "own_ops/token_shift"}
EXAMPLES = ROOT / "examples"
ALL = [
    path
    for path in (*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*/*.py"))
    if path.parent.name != "benchmark" and path.stem != "__init__"
]
RUN = sorted(path for path in ALL if 'if __name__ == "__main__":' in path.read_text())


def name(path: Path) -> str:
    """Its path in the folder of the examples, without its ending."""
    return path.relative_to(EXAMPLES).with_suffix("").as_posix()


def test_the_others_are_helpers() -> None:
    assert {name(path) for path in ALL} - {name(path) for path in RUN} == HELPERS


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_it_is_short_and_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    tree = ast.parse(text)
    assert f"python examples/{name(path)}.py" in (ast.get_docstring(tree) or "")
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in ("main", "parse"):
            assert ast.get_docstring(node), f"{node.name} says nothing about itself"


def test_readme_lists_each() -> None:
    section = (ROOT / "README.md").read_text().split("\n## Examples\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `([\w/]+)\.py` \|", section, re.MULTILINE)
    assert sorted(listed) == sorted(name(path) for path in RUN)
