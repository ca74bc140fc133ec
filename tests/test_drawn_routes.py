"""The routes through the code that CONTRIBUTING draws are there."""

from __future__ import annotations

import re
from collections.abc import Sequence

from import_graph import ROOT, Graph, imports


def drawn_arrows(page: str) -> list[tuple[str, str]]:
    """Of the routes that are drawn in a page, each file and the file that it is indented below."""
    found, above = [], list[tuple[int, str]]()
    for line in page.splitlines():
        drawn = re.match(r"( *)([\w/]+\.py)  ", line)
        if drawn is None:
            above = []
            continue
        indent, name = len(drawn[1]), drawn[2]
        above = [each for each in above if each[0] < indent]
        if above:
            found.append((above[-1][1], name))
        above.append((indent, name))
    return found


def untrue(arrows: Sequence[tuple[str, str]], graph: Graph) -> list[tuple[str, str]]:
    """The arrows between files, named by the ends of their paths, that are no imports, also none
    through a package that re-exports."""
    paths = {f"/{name.replace('.', '/')}.py": name for name in graph}

    def named(end: str) -> set[str]:
        return {name for path, name in paths.items() if path.endswith(f"/{end}")}

    def imported(importer: str) -> set[str]:
        packages = {p for p in graph[importer] if any(m.startswith(f"{p}.") for m in graph)}
        return graph[importer].union(*(graph.get(package, set()) for package in packages))

    return [
        (above, below)
        for above, below in arrows
        if not any(imported(importer) & named(below) for importer in named(above))
    ]


def test_the_routes_that_are_drawn_are_imports() -> None:
    graph, page = imports(ROOT), (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    arrows = drawn_arrows(page)
    assert len(arrows) > 15
    when_asked_for = ("annotations/parallel.py", "engines/torch/module/entry.py")
    assert untrue(arrows, graph) == [when_asked_for]
    assert untrue([("op/bound.py", "op/eager.py")], graph) == [("op/bound.py", "op/eager.py")]
