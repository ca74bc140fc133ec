"""How each op of a captured graph may run on a mesh.

A strategy gives, for each mesh axis, the placements of an op's tensor inputs and of its results.
First each axis is considered alone: annotations decide for annotated ops, DTensor for all others
(:mod:`.dtensor_probe`). Then every choice on one axis is combined with every choice on the others.

one axis: AxisStrategy    --combine-->    all axes: Strategy
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.fx import Node

from annotations.library.cached_calls import cached
from annotations.registry import OpRecord, record_of
from annotations.rules import InnerCost, SplitSite

from ..capture.nodes import arguments_of, signature, tensor_inputs, values_of
from .aten import LOCAL, name_of
from .dtensor_probe import ask_dtensor
from .one_axis import AxisStrategy, annotated_strategies, local_strategies, stored_strategies, whole
from .placements import Placements, fits, local_shape

# What DTensor answered, for all graphs of this process.
_asked: dict[Any, list[AxisStrategy]] = {}

# Group name to pass when only costs are asked for; no group is used.
COST_ONLY = "cost only"


@dataclass(frozen=True)
class Strategy:
    """One way to run an op on the mesh.

    Attributes:
        inputs, outputs, grads: placements of each tensor, as in AxisStrategy.
        split: for each axis what an annotated op is split on.
        inner: for each axis what an annotated op moves inside, and how uneven its parts are.
        divided: for each axis whether each of its ranks does only a part of the work.
        local: run the op on the local tensors themselves, not through DTensor.
    """

    inputs: tuple[Placements, ...]
    outputs: tuple[Placements, ...]
    grads: tuple[Placements, ...]
    split: tuple[str | None, ...]
    inner: tuple[InnerCost, ...]
    divided: tuple[bool, ...]
    local: bool


def strategies_of(
    node: Node, mesh: DeviceMesh, known: dict[Any, list[Strategy]], stored: bool
) -> list[Strategy]:
    """Every way to run ``node``; the first is always to run it whole on each rank.

    Args:
        known: a cache to pass to every call for this mesh.
        stored: ``node`` is a parameter, which may be kept in parts.
    """
    inputs = tensor_inputs(node)
    key = (signature(node, inputs), stored)
    if key not in known:
        along = [_along_axis(node, inputs, mesh, axis, stored) for axis in range(mesh.ndim)]
        known[key] = _combine(node, inputs, along, tuple(mesh.shape))
    return known[key]


def _along_axis(
    node: Node, inputs: Sequence[Node], mesh: DeviceMesh, axis: int, stored: bool
) -> list[AxisStrategy]:
    """The ways to run an op cut along one axis of the mesh; the first is to run it whole."""
    record, parts = record_of(node.target), mesh.size(axis)
    if stored:
        return stored_strategies(node, parts)
    if record is not None:
        return annotated_strategies(node, record, parts)
    if name_of(node) in LOCAL:
        return local_strategies(node, parts)
    uncut = whole(len(inputs), len(values_of(node)))
    if node.op != "call_function" or not inputs:
        return [uncut]
    key = mesh.device_type, signature(node, inputs), parts
    answers = cached(_asked, key, lambda: ask_dtensor(node, inputs, mesh, axis))
    return [uncut, *answers]


def _combine(
    node: Node,
    inputs: Sequence[Node],
    along: Sequence[Sequence[AxisStrategy]],
    parts: tuple[int, ...],
) -> list[Strategy]:
    """Every choice on one axis with every choice on the others, where these are compatible."""
    values = [x.meta["val"] for x in inputs]
    results = values_of(node)
    found = []
    for combination in itertools.product(*along):
        local = all(s.local or not s.divides for s in combination)
        if not _go_together(node, combination, local):
            continue
        made = Strategy(
            tuple(zip(*(s.inputs for s in combination), strict=True)),
            tuple(zip(*(s.outputs for s in combination), strict=True)),
            tuple(zip(*(s.grads for s in combination), strict=True)),
            tuple(s.identifier for s in combination),
            (InnerCost(),) * len(parts),
            tuple(s.divides for s in combination),
            local,
        )
        placed = zip((*values, *results), (*made.inputs, *made.outputs), strict=True)
        if all(fits(value, placements, parts) for value, placements in placed):
            found.append(_with_costs(node, made, parts))
    return found


def _go_together(node: Node, combination: Sequence[AxisStrategy], local: bool) -> bool:
    """Whether one alternative of the annotation has all these splits. Two axes may split the same
    identifier only if the op runs on local tensors and need not know."""
    record = record_of(node.target)
    names = [s.identifier for s in combination if s.identifier is not None]
    if record is None or len(names) < 2:
        return True
    if len(set(names)) < len(names) and not local:
        return False
    bounds = record.bindings(arguments_of(node, record))
    return any(set(names) <= {split.identifier for split in b.splits()} for b in bounds)


def _with_costs(node: Node, strategy: Strategy, parts: tuple[int, ...]) -> Strategy:
    """``strategy`` with what its op moves inside along each axis, given tensors as the other axes
    cut them."""
    record = record_of(node.target)
    if record is None or strategy.local:
        return strategy
    inner = [InnerCost() for _ in parts]
    for axis, identifier in enumerate(strategy.split):
        if identifier is not None:
            arguments = _cut_elsewhere(node, record, strategy, parts, axis)
            inner[axis] = _inner_cost(record, identifier, parts[axis], arguments)
    return replace(strategy, inner=tuple(inner))


def _cut_elsewhere(
    node: Node, record: OpRecord, strategy: Strategy, parts: tuple[int, ...], axis: int
) -> dict[str, Any]:
    """The op's arguments as the ranks of one axis together see them: cut along the other axes."""
    arguments = arguments_of(node, record)
    whole = record.bindings(arguments)
    tensors = [name for name, value in arguments.items() if isinstance(value, Tensor)]
    for other, identifier in enumerate(strategy.split):
        if other != axis and identifier is not None and identifier in record.rule.told:
            size = next(b.sizes[identifier] for b in whole if identifier in b.sizes)
            site = SplitSite(identifier, size, parts[other], COST_ONLY)
            arguments |= record.rule.arguments(record.title, site)
    for name, placements in zip(tensors, strategy.inputs, strict=True):
        others = tuple(Replicate() if a == axis else p for a, p in enumerate(placements))
        shape = local_shape(arguments[name].shape, others, parts)
        if shape != tuple(arguments[name].shape):
            arguments[name] = torch.empty(shape, dtype=arguments[name].dtype, device="meta")
    return arguments


def _inner_cost(
    record: OpRecord, identifier: str, parts: int, arguments: Mapping[str, Any]
) -> InnerCost:
    bounds = record.bindings(arguments)
    bound = next(b for b in bounds if identifier in {s.identifier for s in b.splits()})
    site = SplitSite(identifier, bound.sizes[identifier], parts, COST_ONLY)
    itemsize = next(v.dtype.itemsize for v in arguments.values() if isinstance(v, Tensor))
    return record.rule.cost(bound, site, arguments, itemsize)
