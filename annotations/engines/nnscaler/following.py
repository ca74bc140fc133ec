"""Finds cuts for the other ops of an nnscaler graph that follow from the cuts of some.

Attention's sequence is cut; the linears before it and the norms after it should be cut the same
way, so that nothing moves between them. Takes nnscaler's nodes, but imports none of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

InputDim = tuple[int, int]  # the n-th input, its dim


@dataclass(frozen=True)
class Way:
    """One way to cut an op: by ``cut``, and what that does to its tensors.

    Attributes:
        inputs, outputs: by whole tensor, the dim that is cut; None if it is whole on every rank.
        partial: whether some result is then a partial sum.
    """

    cut: InputDim
    inputs: Mapping[Any, int | None]
    outputs: Mapping[Any, int | None]
    partial: bool


def ways_of(node: Any, ranks: int) -> list[Way]:
    """Every way to cut ``node`` evenly over ``ranks``."""
    algorithm = node.algorithm("dim")
    found = []
    for index, dim in node.transform_space():
        tensor = node.input(index)
        if not tensor.dim_tracks[dim].is_constant or not algorithm.satisfy(index, dim, ranks):
            continue
        rule = algorithm.infer(index, dim, ranks)
        found.append(
            Way(
                (index, dim),
                _cut_dims(node.inputs(), rule.inputs()),
                _cut_dims(node.outputs(), rule.outputs()),
                any(split.isV() for split in rule.outputs()),
            )
        )
    return found


def _cut_dims(tensors: Sequence[Any], splits: Sequence[Any]) -> dict[Any, int | None]:
    return {
        tensor.parent: split.dims[0] if split.isD() else None
        for tensor, split in zip(tensors, splits, strict=True)
        if hasattr(tensor, "parent")
    }


def follow(
    nodes: Sequence[Any], fixed: Mapping[Any, InputDim], ranks: int
) -> dict[Any, InputDim | None]:
    """A cut for each op, None for whole on every rank.

    First backwards: an op is cut so that its results are cut as their readers want them. Then
    forwards: an op is cut as its inputs are, if one cut fits all of them.

    Args:
        nodes: in order of execution. fixed: the ops whose cut is given.
    """
    ways = {
        node: ways_of(node, ranks) if hasattr(node, "transform_space") else [] for node in nodes
    }
    chosen: dict[Any, Way | None] = {}
    for node, cut in fixed.items():
        chosen[node] = next(way for way in ways[node] if way.cut == cut)
    wanted: dict[Any, int] = {}  # by tensor
    for node in reversed(nodes):
        if node not in chosen:
            fits = [w for w in ways[node] if not w.partial and _agrees(w.outputs, wanted)]
            if fits:
                chosen[node] = fits[0]
        way = chosen.get(node)
        _note(wanted, way.inputs if way else {})
    cut_now: dict[Any, int] = {}
    for node in nodes:
        if node not in chosen:
            fits = [w for w in ways[node] if _agrees(w.inputs, cut_now)]
            chosen[node] = fits[0] if fits else None
        way = chosen[node]
        _note(cut_now, way.outputs if way else {})
    return {node: way.cut if (way := chosen[node]) else None for node in nodes}


def _agrees(dims: Mapping[Any, int | None], known: Mapping[Any, int]) -> bool:
    """Whether some of the tensors have known dims, and all of these are cut on them."""
    met = [tensor for tensor in dims if tensor in known]
    return bool(met) and all(dims[tensor] == known[tensor] for tensor in met)


def _note(known: dict[Any, int], dims: Mapping[Any, int | None]) -> None:
    for tensor, dim in dims.items():
        if dim is not None and not tensor.is_param():
            known.setdefault(tensor, dim)
