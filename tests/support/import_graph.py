"""What each module of the packages imports.

Every import statement counts, also one in a function and one under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("annotations", "customized_ops")
Graph = Mapping[str, set[str]]


def files(root: Path) -> dict[str, Path]:
    """The modules of the packages, by name."""
    found = {}
    for package in PACKAGES:
        for path in (root / package).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(root: Path) -> Graph:
    """Of each module of the packages, the modules that it imports, by full name; a package that is
    imported only because it holds one of these does not count."""
    modules = files(root)
    return {name: set(_imported(name, path, modules)) for name, path in modules.items()}


@functools.cache
def nodes(text: str) -> list[ast.AST]:
    """All of a module's syntax."""
    return list(ast.walk(ast.parse(text)))


def _imported(name: str, path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in nodes(path.read_text(encoding="utf-8")):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                yield inner if inner in modules else module


def circle(graph: Graph) -> list[str]:
    """The modules of a circle of imports; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []
