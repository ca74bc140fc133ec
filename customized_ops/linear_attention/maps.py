"""Maps of states, S -> A S + b, and their scan over ranks.

A is dense, [..., dk, dk], for the delta rule; for gates alone it is diagonal and held as a column,
[..., dk, 1] or [..., 1, 1]. The first dim is that of segments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..ring_attention.core.comm import Comm
from ..ring_attention.core.comm.pending import Pending
from ..ring_attention.core.comm.transfer_side import Dims
from ..ring_attention.core.plan.exchanges.exchange import Exchange
from .chains import Scan

SEGMENTS = Dims(tokens=0, heads=2)
Composed = tuple[Tensor | None, Tensor]  # A and b; A is None where they begin the document


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
    """A transposed; a diagonal A is its own transpose."""
    return a if a.shape[-1] == 1 else a.mT


class EnteringStates:
    """What enters each of a rank's chained segments from those before it in its chain.

    Rounds are sent and received one after the other, on every rank alike.

    Attributes:
        maps: what segments send. When a segment is run in turn, the caller puts its state in ``b``.
        states: [k, b, hv, dk, dv], 0 for the first of a chain, whose b begins with the document;
            complete for a segment after as many rounds as :attr:`.Scan.known` says.
    """

    def __init__(self, maps: StateMaps, scan: Scan, comm: Comm, fingerprint: int) -> None:
        self.maps, self.comm, self.scan = maps, comm, scan
        self.states = torch.zeros_like(maps.b)
        self._rounds, self._number = scan.of_rank(comm.rank), 0
        self._fingerprint = fingerprint  # of the pass
        self._covered: dict[int, Composed] = {}  # by segment, so far
        self._pending: list[Pending] = []

    def send(self) -> None:
        """Start the next round."""
        sent, number = self.maps, self._number
        if not number:
            self.comm.begin(self._fingerprint)
        if number and not self.scan.in_turn:
            sent = _compositions(self.maps, self._covered)

        def started(name: str, tensor: Tensor) -> Pending:
            def seen_by(rank: int) -> Exchange:
                return getattr(self.scan.of_rank(rank)[number], name)  # type: ignore[no-any-return]

            own = getattr(self._rounds[number], name)
            return self.comm.fetch(own, [tensor.contiguous()], [SEGMENTS], seen_by)

        self._pending = [started("b", sent.b), started("a", sent.a)]

    def receive(self) -> None:
        """Finish the round: compose what arrived with what segments have composed so far."""
        (states,), (matrices,) = (each.wait() for each in self._pending)
        compose, self._number = self._rounds[self._number].compose, self._number + 1
        found = dict(self._covered)
        for target, from_b, from_a in compose:
            complete = len(from_a) < len(from_b)
            every_a: list[Tensor | None] = [None] if complete else []
            every_a += [matrices[row] for row in from_a]
            maps = list(zip(every_a, (states[row] for row in from_b), strict=True))
            if target in found:  # the nearest of them
                maps.append(found[target])
            composed = maps[0]
            for each in maps[1:]:
                composed = _after(each, composed)
            found[target] = composed
            self.states[target] = composed[1]
        self._covered = found
        if self._number == len(self._rounds):
            self.comm.end()
            self.comm.leave()  # ranks are at the same step, whatever becomes of the rest


def _compositions(maps: StateMaps, covered: dict[int, Composed]) -> StateMaps:
    """What segments send from the second round on."""
    a, b = torch.zeros_like(maps.a), torch.zeros_like(maps.b)
    for target, (own_a, own_b) in covered.items():
        b[target] = own_b
        if own_a is not None:
            a[target] = own_a
    return StateMaps(a, b)


def _after(later: Composed, before: Composed) -> Composed:
    """Two maps in one."""
    a, b = later
    assert a is not None, "what follows another composition needs its matrix"
    return None if before[0] is None else applied(a, before[0]), applied(a, before[1]) + b
