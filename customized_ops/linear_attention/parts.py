"""A pass over a rank's segments in rounds: what needs no states, what arrives, what is sent.

A kernel runs segments together in *parts*: the segments of a part know the states that enter them
after the same number of rounds. In a scan of maps, segments between others compute their maps
before the first round.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..ring_attention.core.arrays import Bools, Ints, columns
from .chains import Scan
from .kernels import Operands
from .maps import EnteringStates, StateMaps
from .rank_call import RankCall


@dataclass
class Part:
    """Segments that a kernel runs together.

    Attributes:
        known: after how many rounds the states that enter them are known.
        between: whether other segments wait for their maps.
        run: the kernel's run of them, once it has begun.
    """

    segments: Sequence[int]
    known: int
    between: bool
    run: Any = None


class Pass(ABC):
    """A pass where documents span segments: what a part does at once, what it sends, and the rest.

    Args:
        ends: bool[m]: the rank's segments that no other segment follows in the pass's direction.
        given: the states that enter segments, but for those that other segments send; None: 0. (In
            a backward, which goes the other way, all states here are gradients of states.)
    Attributes:
        left: the states that have left the rank's segments.
    """

    def __init__(self, call: RankCall, scan: Scan, ends: Bools, given: Tensor | None) -> None:
        self.call, self.scan, local = call, scan, call.local
        self.given, self.left = given, call.x.empty_states(len(local))
        self.row = np.where(local.chained, np.cumsum(local.chained) - 1, -1)
        self.sent = np.where(ends, -1, self.row)
        self.maps = _no_maps(call)
        same = call.fingerprint(type(self).__name__)
        self.entering = EnteringStates(self.maps, scan, call.comm, same)
        known = np.zeros(len(local), np.int64)
        known[local.chained] = scan.known[scan.rank == call.comm.rank]
        between = (known > 0) & ~ends & (not scan.in_turn)
        kinds = np.unique(columns(known, between), axis=0).tolist()
        self.parts = [
            Part(np.flatnonzero((known == n) & (between == b)).tolist(), n, bool(b))
            for n, b in kinds
        ]

    def go(self) -> None:
        """Run all rounds. Work that peers wait for comes first, and a rank does what it can before
        it waits. (Messages would have to wait for kernels that fill a GPU; with messages a rank
        therefore waits for what they bring first, and does the rest after that.)"""
        rounds, late = len(self.scan.rounds), self.call.comm.writes_to_peers
        for part in self.parts:
            if part.between:
                self._send_map(part)
        for number in range(rounds + 1):
            if number and late:
                self.entering.receive()
            now = [part for part in self.parts if part.known == number]
            for part in now:
                left = self.leave(self._run(part), self.entered(part))
                put(left, self.left, part.segments)
                if self.scan.in_turn or not number:
                    put(left, self.maps.b, self.sent[part.segments])
            if not now:
                self._prepare(number)
            if number < rounds:
                self.entering.send()
                if not late:
                    self.entering.receive()
            for part in now:
                self.rest(part, part.run)
                part.run = None
            self._prepare(number)

    def _run(self, part: Part) -> Any:
        if part.run is None:
            part.run = self.make(part.segments)
        return part.run

    def _prepare(self, number: int) -> None:
        """Start the parts that come next after this round, as far as they can go without states."""
        later = [part for part in self.parts if part.known > number]
        for part in later:
            if part.known == later[0].known:
                self.ahead(self._run(part))

    def _send_map(self, part: Part) -> None:
        run, row, x = self._run(part), self.row[part.segments], self.call.x
        matrices = self.matrices(part, run) if x.delta else _decay(x.part(part.segments))
        put(matrices, self.maps.a, row)
        put(self.leave(run, None), self.maps.b, row)

    def entered(self, part: Part) -> Any:
        """The states that enter a part: given to the call, or received from other segments."""
        if part.known:
            return some(self.entering.states, self.row[part.segments])
        return some(self.given, part.segments)

    @abstractmethod
    def make(self, segments: Sequence[int]) -> Any:
        """Begin the kernel's run of these segments."""

    @abstractmethod
    def matrices(self, part: Part, run: Any) -> Tensor:
        """A of each segment of the part; for the delta rule only."""

    @abstractmethod
    def leave(self, run: Any, entered: Tensor | None) -> Tensor | None:
        """The states that leave the segments of a run, from those that enter them; None: 0."""

    @abstractmethod
    def rest(self, part: Part, run: Any) -> None:
        """Do the work that no other segment waits for."""

    @abstractmethod
    def ahead(self, run: Any) -> None:
        """Do the work that needs no states from other segments."""


class PartTokens:
    """A tensor of all the rank's tokens, filled part by part.

    Attributes:
        whole: the tensor, of the shape and dtype of ``like``; if there is only one part, that part.
    """

    def __init__(self, like: Tensor, x: Operands, parts: int) -> None:
        self.x = x
        self.whole = like.new_empty(like.shape if parts != 1 else (0,))
        self.one = parts == 1

    def view(self, segments: Sequence[int]) -> Tensor | None:
        """Where a part's tokens should be written; None if they do not form one range, or if the
        kernel may choose."""
        bounds = self.x.bounds(segments)
        if self.one or any(a[1] != b[0] for a, b in pairwise(bounds)):
            return None
        return self.whole[:, bounds[0][0] : bounds[-1][1]]

    def put(self, segments: Sequence[int], part: Tensor) -> None:
        """Copy a part into the tensor, unless the kernel wrote it there."""
        if self.one:
            self.whole = part
        elif (view := self.view(segments)) is not None:
            if view.data_ptr() != part.data_ptr():
                view.copy_(part)
        else:
            at = 0
            for start, stop in self.x.bounds(segments):
                self.whole[:, start:stop] = part[:, at : at + stop - start]
                at += stop - start


def put(source: Tensor | None, into: Tensor, rows: Sequence[int] | Ints) -> None:
    """Copy states one by one: an index would be copied to the device. Row -1 is skipped."""
    assert source is not None
    for n, row in enumerate(rows):
        if row >= 0:
            into[row] = source[n]


def some(states: Tensor | None, rows: Sequence[int] | Ints) -> Any:
    """Some rows, taken by views: an index would be copied to the device, and waited for."""
    if states is None:
        return None
    first, last = int(rows[0]), int(rows[-1])
    if last - first == len(rows) - 1:
        return states[first : last + 1]  # rows increase
    return torch.stack([states[row] for row in rows])


def _decay(x: Operands) -> Tensor:
    """A for gates alone, the decay over each segment: [m, b, hv, dk or 1, 1]."""
    ends = zip(x.ends[:-1].tolist(), x.ends[1:].tolist(), strict=True)
    total = torch.stack([x.g[:, a:b].to(x.state_dtype).sum(1) for a, b in ends])
    return total.exp().reshape(*total.shape[:3], -1, 1)


def _no_maps(call: RankCall) -> StateMaps:
    """Maps of zeros for the rank's chained segments; they stay 0 where no segment needs them."""
    b = call.x.empty_states(int(call.local.chained.sum()))
    dk = b.shape[-2]
    rows = dk if call.x.delta or call.x.channels else 1
    return StateMaps(b.new_zeros(*b.shape[:-2], rows, call.x.matrix_width), b)
