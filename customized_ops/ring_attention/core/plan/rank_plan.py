"""One rank's part of a plan: what it sends and receives, and the mask over its buffers.

A place (start, stop, offset) says that a buffer holds tokens start .. stop - 1 from offset on. A
slice becomes slices over two buffers by cutting it where places end and shifting it; nothing here
depends on what kind of mask it came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from ..arrays import Ints, columns
from ..mask.intervals import depth, runs, spread, touched, union
from ..mask.slices import HI, K0, K1, LO, Q0, Q1, Slices, areas, clip_each, cut_rows, shift
from .exchange import Exchange

Range = tuple[int, int]  # start, stop
START, STOP, OFFSET = range(3)  # columns of places
NO_SLICES: Slices = np.zeros((0, 6), dtype=np.int64)
NO_PLACES: Ints = np.zeros((0, 3), dtype=np.int64)
# Slices times places up to which all stages are cut at once.
AT_ONCE = 20_000
# Parts more than there were, up to which slices are cut at all places of keys.
FEW_CUTS = 1_000


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
        """The same of the received rows."""
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
        """Work out now what a step looks up, not in the step."""
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
        """Kernel calls in the forward pass, of so many key heads."""
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
        """The most parts that the result of one own row, and its dq, comes in: from stages here and
        from other teams. At most 1: there is nothing to merge."""
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
        """The most parts that dk and dv of one own key come in: from calls over the keys read in
        place and from where they are sent. With heads split, each rank of a team is counted as if
        it had a part of every head: several may, of a key head that they share."""
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
    """int64[n, 3]: parts of own tokens that are sent to each; ``to``, int64[n], says whom ``send``
    is to."""
    return columns(to, send[:, 1], send[:, 1] + send[:, 2])


def _row_hull(slices: Slices) -> Range:
    if len(slices) == 0:
        return 0, 0
    return int(slices[:, Q0].min()), int(slices[:, Q1].max())


def _most_parts(tables: Sequence[Ints]) -> int:
    """The most parts that hold one token. Each table is of other parts: their numbers in it, and
    ranges of their tokens, start and stop."""
    part, start, stop = np.concatenate(tables).T
    if len(part) == 0:
        return 0
    table = np.arange(len(tables)).repeat([len(each) for each in tables])
    _, start, stop = union(table * (int(part.max()) + 1) + part, start, stop).T
    return depth(start, stop)


def over_buffers(slices: Slices, rows: Ints, keys: Ints) -> Slices:
    """``slices`` over two buffers, as few as can be.

    Args:
        slices: normalised int64[n, 6] in global indices.
        rows, keys: places int64[m, 3] in the query and the key buffer, sorted by start.
    Returns:
        normalised int64[t, 6] in buffer positions, by row and then by key.
    """
    return over_keys(over_rows(slices, rows), keys)


def over_rows(slices: Slices, rows: Ints) -> Slices:
    """``slices`` with rows in positions of a query buffer; see :func:`over_buffers`."""
    if len(slices) == 0 or len(rows) == 0:
        return NO_SLICES
    _, place, parts = cut_rows(slices, rows[:, :OFFSET])
    return _moved(parts, q_by=rows[place, OFFSET] - rows[place, START])


def over_keys(parts: Slices, keys: Ints) -> Slices:
    """What :func:`over_rows` made with keys in positions of a key buffer."""
    if len(parts) == 0 or len(keys) == 0:
        return NO_SLICES
    return joined_keys(_over_keys(parts, keys))


def over_stages(
    slices: Slices, rows: Sequence[Ints], keys: Sequence[Ints]
) -> list[tuple[Slices, ...]]:
    """:func:`over_buffers` for the key buffer of each stage and each of some query buffers: a tuple
    of these for each stage. No token is in two buffers of a side.

    Few places are taken as those of one long buffer, so that numpy is called once; of many, those
    of several stages may lie between one another, and cut slices into too many parts.
    """
    (row_places, row_stride), (key_places, key_stride) = map(_end_to_end, (rows, keys))
    parts = over_rows(slices, row_places[row_places[:, START].argsort()])
    if len(parts) * len(key_places) > AT_ONCE:
        ends = np.cumsum([len(places) for places in keys])
        cut = [over_keys(parts, places) for places in np.split(key_places, ends[:-1])]
        every = np.concatenate(cut)
    else:
        every = over_keys(parts, key_places[key_places[:, START].argsort()])
    row, stage = every[:, Q0] // row_stride, every[:, K0] // key_stride
    buffers = stage * len(rows) + row
    order = buffers.argsort(kind="stable")
    cuts = buffers[order].searchsorted(np.arange(len(rows) * len(keys) + 1)).tolist()
    every = _moved(every, -row_stride * row, -key_stride * stage)[order]
    each = [every[a:b] for a, b in pairwise(cuts)]
    return list(zip(*[iter(each)] * len(rows), strict=True))


def _end_to_end(buffers: Sequence[Ints]) -> tuple[Ints, int]:
    """The places of some buffers as those of one, and how far apart each begins in it: more than a
    buffer, so that none touches the next."""
    places = np.concatenate([NO_PLACES, *buffers])
    ends = places[:, OFFSET] + places[:, STOP] - places[:, START]
    stride = int(ends.max(initial=0)) + 1
    places[:, OFFSET] += stride * np.arange(len(buffers)).repeat([len(each) for each in buffers])
    return places, stride


def _over_keys(parts: Slices, keys: Ints) -> Slices:
    """``parts``, whose rows are in buffer positions already, cut at the places of keys. Of many,
    those that all rows of a part see whole and that are neighbours in the buffer are not cut apart:
    with short places (stripes) their number would be rows times keys."""
    tiles = keys[:, :OFFSET]
    first, last = touched(parts[:, K0], parts[:, K1], tiles)
    if (last - first).sum() <= len(parts) + FEW_CUTS:
        return _at_places(parts, keys, first, last)  # which :func:`joined_keys` joins again
    whole0 = np.maximum(parts[:, K0], parts[:, Q1] - 1 + parts[:, LO])
    whole1 = np.minimum(parts[:, K1], parts[:, Q0] + parts[:, HI] + 1)
    core0 = np.minimum(np.maximum(keys[:, START].searchsorted(whole0), first), last)
    core1 = keys[:, STOP].searchsorted(whole1, side="right")
    core1 = np.minimum(np.maximum(core1, core0), last)
    edges = np.concatenate([first, core1]), np.concatenate([core0, last])
    cut = [_at_places(np.concatenate([parts, parts]), keys, *edges)]
    # Runs of places that are neighbours in the buffer.
    length = keys[:, STOP] - keys[:, START]
    heads, lasts = runs(keys[1:, OFFSET] != (keys[:, OFFSET] + length)[:-1], len(keys))
    (some,) = (core0 < core1).nonzero()
    if len(some) == 0:
        return cut[0]
    tiles = columns(heads, lasts + 1)
    x, r = spread(*touched(core0[some], core1[some], tiles))
    x = some[x]
    begin, end = np.maximum(core0[x], heads[r]), np.minimum(core1[x] - 1, lasts[r])
    k0, k1 = keys[begin, OFFSET], keys[end, OFFSET] + length[end]
    q0, q1 = parts[x, Q0], parts[x, Q1]
    cut.append(columns(q0, q1, k0, k1, k0 - q1 + 1, k1 - 1 - q0))
    return np.concatenate(cut)


def _at_places(parts: Slices, keys: Ints, first: Ints, last: Ints) -> Slices:
    """Each of ``parts`` cut at its places of keys, first .. last - 1, and in their positions."""
    x, place = spread(first, last)
    cut = clip_each(parts[x], keys[place, :OFFSET], K0)
    return _moved(cut, k_by=keys[place, OFFSET] - keys[place, START])


def _moved(parts: Slices, q_by: Ints | int = 0, k_by: Ints | int = 0) -> Slices:
    """``parts``, each with its own shift."""
    q0, q1, k0, k1, lo, hi = parts.T
    band = k_by - q_by
    return columns(q0 + q_by, q1 + q_by, k0 + k_by, k1 + k_by, lo + band, hi + band)


def joined_keys(slices: Slices) -> Slices:
    """Join slices over the same rows whose keys are side by side and which one band describes:
    a rectangle and the triangle right of it are one causal slice."""
    slices = slices[np.lexsort((slices[:, K0], slices[:, Q1], slices[:, Q0]))]
    left, right = slices[:-1], slices[1:]
    q0, q1, edge = left[:, Q0], left[:, Q1], left[:, K1]
    joins = (
        (q0 == right[:, Q0])
        & (q1 == right[:, Q1])
        & (edge == right[:, K0])
        & (left[:, HI] >= edge - 1 - q0)  # every row sees the left one up to its edge,
        & (right[:, LO] <= edge - q1 + 1)  # and the right one from its edge on,
        & (right[:, HI] >= edge - 1 - q0)  # and neither band cuts into the other
        & (left[:, LO] <= edge - q1 + 1)
    )
    if not joins.any():
        return slices
    heads, lasts = runs(~joins, len(slices))
    out = slices[heads]
    out[:, K1], out[:, HI] = slices[lasts, K1], slices[lasts, HI]
    return out
