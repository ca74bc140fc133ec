"""One rank's part of a plan: what it sends and receives, and the mask over its buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..arrays import Ints, columns
from ..mask.intervals import depth, union
from ..mask.slices import K0, Q0, Q1, Slices, areas, shift
from .exchanges.exchange import Exchange

Range = tuple[int, int]  # start, stop


@dataclass(frozen=True)
class Stage:
    """Keys to attend at one step.

    Attributes:
        kv: what to receive, or None where the rank's own key and value tensors are read in place.
        own: int64[n, 6] slices over (rows of the rank's own q, keys of this stage).
        remote: the same over (rows of the received q, keys of this stage).
    """

    kv: Exchange | None
    own: Slices
    remote: Slices

    @property
    def area(self) -> int:
        """Pairs attended in this stage."""
        return int(areas(self.own).sum() + areas(self.remote).sum())

    @cached_property
    def own_hull(self) -> Range:
        """From the first of the rank's own rows that attend something here to the last; (0, 0)
        where none does. A kernel need not see the rows around it, nor a merge touch them."""
        return _row_hull(self.own)

    @cached_property
    def remote_hull(self) -> Range:
        """The same for the received rows."""
        return _row_hull(self.remote)

    @cached_property
    def own_in_hull(self) -> Slices:
        """:attr:`own` with rows counted from the start of :attr:`own_hull`."""
        return shift(self.own, -self.own_hull[0], 0)

    @cached_property
    def remote_in_hull(self) -> Slices:
        """:attr:`remote` with rows counted from the start of :attr:`remote_hull`."""
        return shift(self.remote, -self.remote_hull[0], 0)


@dataclass(frozen=True)
class RankPlan:
    """One rank's part: exchange rows, attend stage by stage, send remote results home.

    Attributes:
        shared_rows: whether some row anywhere is computed by more than one team, so that results
            coming home are merged rather than placed.
        head_groups: groups of heads in which received keys arrive and are attended.
    """

    rank: int
    q: Exchange
    stages: tuple[Stage, ...]
    shared_rows: bool
    head_groups: int = 1

    def prepare(self) -> None:
        """Work out, ahead of a step, what it looks up."""
        stages = [(stage, ("own_in_hull", "remote_in_hull")) for stage in self.stages]
        own = (self, ("local", "late_rows", "row_parts", "remote_parts", "key_parts"))
        for each, names in (own, *stages):
            for name in names:
                getattr(each, name)

    @property
    def area(self) -> int:
        """Pairs this rank computes, each for its share of the heads."""
        return sum(stage.area for stage in self.stages)

    def calls(self, kv_heads: int) -> int:
        """Kernel calls in the forward pass, with ``kv_heads`` key heads."""
        calls = [(len(s.own) > 0) + (len(s.remote) > 0) for s in self.stages]
        times = [1 if s.kv is None else min(self.head_groups, kv_heads) for s in self.stages]
        return sum(n * m for n, m in zip(calls, times, strict=True))

    @cached_property
    def key_exchanges(self) -> list[tuple[int, Exchange]]:
        """The stages whose keys are received: their numbers, and what is received."""
        return [(n, stage.kv) for n, stage in enumerate(self.stages) if stage.kv is not None]

    @cached_property
    def local(self) -> Stage | None:
        """The stage of the rank's own keys, read in place, if own rows attend some of them."""
        first = self.stages[0]
        return first if first.kv is None and len(first.own) else None

    @cached_property
    def late_rows(self) -> Range:
        """From the first own row that attends keys of another stage to the last; (0, 0): none."""
        late = [stage.own_hull for stage in self.stages if stage is not self.local]
        late = [hull for hull in late if hull != (0, 0)]
        return min((a for a, _ in late), default=0), max((b for _, b in late), default=0)

    @cached_property
    def row_parts(self) -> int:
        """The most parts in which the result of one own row, and its dq, arrives: from stages here
        and from other teams. If at most 1, there is nothing to merge."""
        team = self.q.send[:, 0] // self.q.team_size
        away = team != self.rank // self.q.team_size  # what its own makes of each head is like here
        here = [_here(stage.own, Q0) for stage in self.stages]
        return _most_parts([*here, _sent(self.q.send[away], team[away])])

    @cached_property
    def remote_parts(self) -> int:
        """The most stages that make a part of one received row."""
        return _most_parts([_here(stage.remote, Q0) for stage in self.stages])

    @cached_property
    def key_parts(self) -> int:
        """The most parts in which dk and dv of one own key arrive: from calls over the keys read in
        place, and from the ranks that keys are sent to. With heads split, each rank of a team is
        counted as if it had a part of every head, since several may have one of a key head that
        they share."""
        parts = []
        for stage in self.stages:
            if stage.kv is None:
                parts += [_here(slices, K0) for slices in (stage.own, stage.remote)]
            else:
                straight, *relay = stage.kv.parts
                parts += [_sent(part.send, part.send[:, 0]) for part in (straight, *relay[:1])]
        return _most_parts(parts)


def _here(slices: Slices, start: int) -> Ints:
    """int64[n, 3]: a part that is made here, number 0, of the rows of ``slices`` (``start`` is Q0)
    or of their keys (K0)."""
    ranges = slices[:, start], slices[:, start + 1]
    return columns(np.zeros_like(ranges[0]), *ranges)


def _sent(send: Ints, to: Ints) -> Ints:
    """int64[n, 3]: parts of own tokens by receiver; ``to``, int64[n], is the receiver of each row
    of ``send``."""
    return columns(to, send[:, 1], send[:, 1] + send[:, 2])


def _row_hull(slices: Slices) -> Range:
    if len(slices) == 0:
        return 0, 0
    return int(slices[:, Q0].min()), int(slices[:, Q1].max())


def _most_parts(tables: Sequence[Ints]) -> int:
    """The most parts that hold one token. Tables have no parts in common; each lists the numbers of
    its parts, and ranges of their tokens, start and stop."""
    part, start, stop = np.concatenate(tables).T
    if len(part) == 0:
        return 0
    table = np.arange(len(tables)).repeat([len(each) for each in tables])
    _, start, stop = union(table * (int(part.max()) + 1) + part, start, stop).T
    return depth(start, stop)
