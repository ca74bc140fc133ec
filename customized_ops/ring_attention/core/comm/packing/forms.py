"""How parts of several tensors lie in flat buffers; the same on both ends of a message."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..transfer_side import Shapes

Wires = tuple[torch.dtype, ...]  # dtypes of the parts of a message


class Group(NamedTuple):
    """Tensors of one dtype, and of as many dims, whose tokens share a buffer, row after row; a row
    has a token of each.

    Attributes:
        some: which tensors.
        wire: their dtype in the buffer.
        width: elements of a row.
        places: of each tensor, its strides in the buffer, and where in a row it begins.
    """

    some: list[int]
    wire: torch.dtype
    width: int
    places: list[tuple[list[int], int]]

    def views(self, flat: Tensor, shapes: Shapes) -> list[Tensor]:
        """The tensors in a buffer; ``shapes`` are those of all tensors, with the buffer's rows."""
        return [
            flat.as_strided(shapes[n], *place)
            for n, place in zip(self.some, self.places, strict=True)
        ]


class RowForm(NamedTuple):
    """How rows lie in buffers; ``row_bytes``: of a token of all tensors."""

    groups: list[Group]
    row_bytes: int


@lru_cache(maxsize=1024)
def row_form(shapes: Shapes, tokens: tuple[int, ...], wires: Wires) -> RowForm:
    """The form of one token of tensors of these shapes and dtypes; ``tokens``: which dim of each
    has it. Rows share no buffer with their statistics, which would leave them unaligned."""
    counts, alike = [prod(shape) for shape in shapes], dict[tuple[torch.dtype, int], list[int]]()
    for n, wire in enumerate(wires):
        alike.setdefault((wire, len(shapes[n])), []).append(n)
    groups = []
    for (wire, _), some in alike.items():
        starts, width = [], 0
        for n in some:
            starts.append(width)
            width += counts[n]
        places = []
        for n, start in zip(some, starts, strict=True):
            shape, token = shapes[n], tokens[n]
            strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
            strides[token] = width
            places.append((strides, start))
        groups.append(Group(some, wire, width, places))
    return RowForm(groups, sum(n * wire.itemsize for n, wire in zip(counts, wires, strict=True)))
