"""Along which dims an op of a graph takes positions in any order.

    linear   [b, l, k], [n, k] -> [b, l, n]     b, l and n: a permutation before the op is the same
                                                one after it
    sum      [b, l, k] -> [b, k]                l: none is needed after it
    conv1d   [b, k, l], [n, k, 3] -> [b, n, l]  not l: neighbours in l belong together

That an op may be cut along a dim without communication does not show this: a view from 12 to 3 x 4
may be cut, but 12 positions in another order are not 3 in another order. So it is written down, in
:mod:`..strategies.aten_axes`, by families of ops; of what is not there nothing is believed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from annotations.binding import BoundAnnotation, Split
from annotations.registry import record_of

from ..capture.nodes import arguments_of
from ..strategies.aten_axes import FAMILIES, Axis, elementwise, name_of, shapes_in, shapes_out

aten = torch.ops.aten

VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}


@dataclass(frozen=True)
class Place:
    """Where a sequence lies in a tensor: its dim ``dim`` is ``outer`` x sequence x ``inner``."""

    dim: int
    outer: int = 1
    inner: int = 1


@dataclass(frozen=True)
class Along:
    """An op along a sequence, which may be in any order if it is the same in all these places.

    Attributes:
        inputs, outputs: where it lies in each tensor input and result; None where it does not.
    """

    inputs: tuple[Place | None, ...]
    outputs: tuple[Place | None, ...]


def along(node: Node, place: Place, length: int, *, slot: int = -1, index: int = 0) -> Along | None:
    """How ``node`` goes along a sequence, or None where it does not take it in any order.

    Args:
        place: where it lies in tensor input ``slot``, or if that is -1 in result ``index``.
        length: of the sequence.
    """
    if node.op != "call_function" or node.target is operator.getitem:
        return None
    if node.target in VIEWS:
        return _through_view(node, place, length, slot)
    for axis in axes_of(node):
        if (axis.outputs[index] if slot < 0 else axis.inputs[slot]) == place.dim:
            return Along(*(tuple(map(_at(place), dims)) for dims in (axis.inputs, axis.outputs)))
    return None


def _at(place: Place) -> Callable[[int | None], Place | None]:
    return lambda dim: None if dim is None else Place(dim, place.outer, place.inner)


def axis_of_split(node: Node, split: Split) -> Axis:
    """The axis of a call of an annotated op that a split of it cuts."""
    record = record_of(node.target)
    assert record is not None
    values = arguments_of(node, record).values()
    tensors = [n for n, value in enumerate(values) if isinstance(value, Tensor)]

    def dim(cut: Any) -> int | None:
        return cut if isinstance(cut, int) else None

    cuts = [split.inputs[n] if n < len(split.inputs) else None for n in tensors]
    return Axis(tuple(map(dim, cuts)), tuple(map(dim, split.outputs)))


def along_split(node: Node, split: Split) -> Along:
    """How a call of an annotated op goes along the dim that a split of it cuts."""
    axis, place = axis_of_split(node, split), _at(Place(0))
    return Along(tuple(map(place, axis.inputs)), tuple(map(place, axis.outputs)))


def axes_of(node: Node) -> list[Axis]:
    """The axes of an op other than a view along which any order will do."""
    record = record_of(node.target)
    if record is not None:
        bound = record.bind(arguments_of(node, record))
        rule = record.rule
        free = [s for s in bound.splits() if s.identifier not in {**rule.communicates, **rule.told}]
        return [axis_of_split(node, s) for s in free if _alone(bound, s.identifier)]
    family = FAMILIES.get(name_of(node))
    if family is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        family = elementwise
    draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if family is None or (draws and "dropout" not in name_of(node)):
        return []
    return list(family(node))


def _alone(bound: BoundAnnotation, identifier: str) -> bool:
    """Whether no dim holds the identifier together with others."""
    shapes = (*bound.annotation.inputs, *bound.annotation.outputs)
    dims = [dim for shape in shapes for dim in shape.dims if identifier in dim.identifiers]
    return all(len(dim.identifiers) == 1 for dim in dims)


def _through_view(node: Node, place: Place, length: int, slot: int) -> Along | None:
    """A view keeps the order of all elements: those before, in and after the sequence."""
    (source,), (target,) = shapes_in(node), shapes_out(node)
    here, there = (target, source) if slot < 0 else (source, target)
    before = math.prod(here[: place.dim]) * place.outer
    after = math.prod(here[place.dim + 1 :]) * place.inner
    for dim, size in enumerate(there):
        lead, tail = math.prod(there[:dim]), math.prod(there[dim + 1 :])
        if before % lead == 0 and after % tail == 0:
            found = Place(dim, before // lead, after // tail)
            if size == found.outer * length * found.inner:
                return Along((found,), (place,)) if slot < 0 else Along((place,), (found,))
    return None
