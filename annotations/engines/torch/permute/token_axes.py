"""Finds the dims along which an op of a graph takes positions in any order.

    linear   [b, l, k], [n, k] -> [b, l, n]     b, l and n: a permutation before the op is the same
                                                one after it
    sum      [b, l, k] -> [b, k]                l: none is needed after it
    conv1d   [b, k, l], [n, k, 3] -> [b, n, l]  not l: neighbours in l belong together

An op's annotation says so. A view has none: 12 positions in another order are not 3 x 4 in another
order, but where the sequence is after the view follows from the shapes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from annotations.binding import BoundAnnotation
from annotations.grammar import Shape
from annotations.registry import record_of
from annotations.solving import reduces_of

from ..capture.nodes import arguments_of, shapes_in, shapes_out
from ..strategies.aten import bound_of, name_of

# These keep the order of all elements.
_VIEWS = {
    *("aten.view", "aten._unsafe_view", "aten.reshape", "aten.flatten", "aten.unflatten"),
    *("aten.unsqueeze", "aten.squeeze"),
}


@dataclass(frozen=True)
class SequenceDim:
    """Where a tensor has a sequence: its dim ``dim`` is ``outer`` x sequence x ``inner``."""

    dim: int
    outer: int = 1
    inner: int = 1


@dataclass(frozen=True)
class Along:
    """How an op goes along a sequence. This may be in any order that is the same in all these dims.

    Attributes:
        inputs, outputs: where each tensor input and result has the sequence; None if it has none.
    """

    inputs: tuple[SequenceDim | None, ...]
    outputs: tuple[SequenceDim | None, ...]


def along(
    node: Node, at: SequenceDim, length: int, *, slot: int = -1, index: int = 0
) -> Along | None:
    """How ``node`` goes along a sequence, or None if it does not take the sequence in any order.

    Args:
        at: where tensor input ``slot`` has the sequence, or result ``index`` if ``slot`` is -1.
        length: of the sequence.
    """
    if node.op != "call_function" or node.target is operator.getitem:
        return None
    if name_of(node) in _VIEWS:
        return _through_view(node, at, length, slot)
    for way in axes_of(node, at.outer, at.inner):
        if (way.outputs[index] if slot < 0 else way.inputs[slot]) == at:
            return way
    return None


def is_known(node: Node) -> bool:
    """Whether it is known how an op goes along its dims, whatever they are."""
    return name_of(node) in _VIEWS or bound_of(node) is not None


def axes_of(node: Node, outer: int = 1, inner: int = 1) -> list[Along]:
    """How an op other than a view goes along each dim that may be in any order: see
    :func:`along_dim`."""
    bound, record = bound_of(node), record_of(node.target)
    if bound is None:
        return []
    shapes = (*bound.annotation.inputs, *bound.annotation.outputs)
    if record is None:
        names: Iterable[str] = [name for name in reduces_of(shapes) if not name.isdecimal()]
    else:
        aware = record.rule.shard_aware
        names = [s.identifier for s in bound.splits() if s.identifier not in aware]
    return [along_dim(node, bound, name, outer, inner) for name in names if _alone(shapes, name)]


def along_dim(
    node: Node, bound: BoundAnnotation, name: str, outer: int = 1, inner: int = 1
) -> Along:
    """How an op goes along the dim of this name, which is ``outer`` x sequence x ``inner``."""
    annotated, record = bound.annotation.inputs, record_of(node.target)
    if record is not None:
        values = list(arguments_of(node, record).values())
        whole = Shape(())  # what is not annotated
        annotated = tuple(
            annotated[n] if n < len(annotated) else whole
            for n, value in enumerate(values)
            if isinstance(value, Tensor)
        )

    def place(shape: Shape) -> SequenceDim | None:
        dims = shape.dims_of(name)
        return SequenceDim(dims[0], outer, inner) if dims else None

    return Along(tuple(map(place, annotated)), tuple(map(place, bound.annotation.outputs)))


def _alone(shapes: Iterable[Shape], name: str) -> bool:
    """Whether no dim holds the name together with others."""
    dims = (dim for shape in shapes for dim in shape.dims)
    return all(dim.identifiers == (name,) for dim in dims if name in dim.identifiers)


def _through_view(node: Node, at: SequenceDim, length: int, slot: int) -> Along | None:
    """A view keeps the order of all elements: those before, in and after the sequence."""
    (source,), (target,) = shapes_in(node), shapes_out(node)
    here, there = (target, source) if slot < 0 else (source, target)
    before = math.prod(here[: at.dim]) * at.outer
    after = math.prod(here[at.dim + 1 :]) * at.inner
    for dim, size in enumerate(there):
        lead, tail = math.prod(there[:dim]), math.prod(there[dim + 1 :])
        if before % lead == 0 and after % tail == 0:
            found = SequenceDim(dim, before // lead, after // tail)
            if size == found.outer * length * found.inner:
                return Along((found,), (at,)) if slot < 0 else Along((at,), (found,))
    return None
