"""Maps of states, S -> A S + b, and their scan over ranks.

A is dense, [..., dk, dk], for the delta rule; for gates alone it is diagonal and held as a column,
[..., dk, 1] or [..., 1, 1]. The first dim is that of segments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..ring_attention.core.comm import Comm
from ..ring_attention.core.comm.transfer_side import Dims
from .chains import RankRound, Scan

SEGMENTS = Dims(tokens=0, heads=2)


class StateMaps(NamedTuple):
    """A map for each of a rank's chained segments.

    Attributes:
        a: [k, b, hv, dk, dk or 1], or [k, b, hv, 1, 1]. b: [k, b, hv, dk, dv].
    """

    a: Tensor
    b: Tensor


def applied(a: Tensor, x: Tensor) -> Tensor:
    """A x, for a state or another A."""
    return a * x if a.shape[-1] == 1 else a @ x


def transposed(a: Tensor) -> Tensor:
    """Of A; a diagonal one is its own."""
    return a if a.shape[-1] == 1 else a.mT


def entering_states(maps: StateMaps, scan: Scan, comm: Comm) -> Tensor:
    """What enters each of the rank's chained segments from those before it in its chain: [k, b, hv,
    dk, dv], 0 for the first of a chain, whose b begins with the document."""
    covered: dict[int, tuple[Tensor | None, Tensor]] = {}
    for number, each in enumerate(scan.of_rank(comm.rank)):
        if number:
            maps = _compositions(maps, covered)
        covered = _next(maps, covered, each, comm)
    states = torch.zeros_like(maps.b)
    for target, (_, b) in covered.items():
        states[target] = b
    return states


def _next(
    maps: StateMaps,
    covered: dict[int, tuple[Tensor | None, Tensor]],
    round_: RankRound,
    comm: Comm,
) -> dict[int, tuple[Tensor | None, Tensor]]:
    """One round: from what segments have composed so far to what they have then.

    Args:
        maps: what is sent: the segments' own maps, or their compositions.
        covered: of each segment its composition; A is None where that begins the document.
    """
    pending = [
        comm.fetch(exchange, [tensor.contiguous()], [SEGMENTS])
        for exchange, tensor in ((round_.b, maps.b), (round_.a, maps.a))
    ]
    (states,), (matrices,) = (each.wait() for each in pending)
    found = dict(covered)
    for target, from_b, from_a in round_.compose:
        complete = len(from_a) < len(from_b)
        every_a: list[Tensor | None] = [None] if complete else []
        every_a += [matrices[row] for row in from_a]
        composed: tuple[Tensor | None, Tensor] | None = None
        pairs = list(zip(every_a, (states[row] for row in from_b), strict=True))
        if target in covered:  # nearest of all
            pairs.append(covered[target])
        for a, b in pairs:
            composed = (a, b) if composed is None else _after(a, b, composed)
        assert composed is not None
        found[target] = composed
    return found


def _compositions(maps: StateMaps, covered: dict[int, tuple[Tensor | None, Tensor]]) -> StateMaps:
    """What segments send from the second round on."""
    a, b = torch.zeros_like(maps.a), torch.zeros_like(maps.b)
    for target, (own_a, own_b) in covered.items():
        b[target] = own_b
        if own_a is not None:
            a[target] = own_a
    return StateMaps(a, b)


def _after(
    a: Tensor | None, b: Tensor, before: tuple[Tensor | None, Tensor]
) -> tuple[Tensor | None, Tensor]:
    """The map (a, b) after another one."""
    assert a is not None, "what follows another composition needs its matrix"
    return None if before[0] is None else applied(a, before[0]), applied(a, before[1]) + b
