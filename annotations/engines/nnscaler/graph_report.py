"""How the ops of an nnscaler graph were cut, as a table. Imports nothing of nnscaler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any


def table(nodes: Iterable[Any], ranks: int) -> str:
    """One line for all ops of one name and cut: name, how many, what they are cut on.

    Args:
        nodes: the parts of all ops, each with a device. ranks: of a scale unit.
    """
    cuts: dict[tuple[str, Any], str] = {}  # by name and first whole result, so one for each op
    for node in nodes:
        results = [t.parent for t in node.outputs() if hasattr(t, "parent")]
        if results and hasattr(node, "anno"):
            cuts.setdefault((node.name, results[0]), _cut(node))
    rows = Counter((name, cut) for (name, _), cut in cuts.items())
    lines = [("op", "count", "cut on"), *((name, str(n), cut) for (name, cut), n in rows.items())]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    text = ["  ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)) for line in lines]
    rule = "-" * (sum(widths) + 4)
    title = f"plan: {ranks} ranks a scale unit"
    return "\n".join(line.rstrip() for line in [title, text[0], rule, *text[1:]])


def _cut(node: Any) -> str:
    found = {}
    for shape, tensor in zip(node.anno.inputs(), node.inputs(), strict=True):
        if not hasattr(tensor, "parent") or shape.ignore:
            continue
        for n, dim in enumerate(shape.dims):
            if tensor.shape[n] != tensor.parent.shape[n]:
                name = next((x for x in dim.identifiers if x != "1"), "1")
                found[name] = f"{name} / {tensor.parent.shape[n] // tensor.shape[n]}"
    return ", ".join(found.values()) or "whole"
