"""Packed documents on hosts, so that few tokens cross between them.

A host must hold its number of tokens and its share of the area, as a rank must
(:mod:`.split_documents`). Here it matters more that a document is on few hosts. Documents are
placed in order of falling area:

1. Each goes whole to a host that lacks that much area: to the one that lacks the most beyond what
   its room is worth at the mean density of the documents to come. A document that is more than any
   host lacks is split: it fills hosts one after the other, and its rest goes to one with as much
   left. The room that a host has left will be filled by sparser documents, which have some area
   too. That area is reserved, at a fraction of their mean density, as some hosts get sparser ones
   than others. A small fraction leaves the fewest documents split; it is raised until the small
   documents can make all hosts even.
2. Small documents, which have most of the tokens, are not split to even out areas.

A stretch of a document is taken from both ends of what is left of it, as with ranks. Under a causal
mask the host of the last rows needs all keys, and receives all that it does not hold. So it takes
more from the front, and so do the next ones, until none receives more than SHARE_OF_FIRST of what
the first would receive otherwise. That has a price: keys at the front are sent to all others. So
the more hosts there are, the less is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...arrays import Bools, Floats, Ints
from .document_areas import DocumentAreas
from .split_documents import LEAST_PART

# Excess area that a host may have, as fractions of its own: in all, and by one whole document.
OVER, WHOLE_OVER = 0.01, 0.003
# Documents with less area are small, as a fraction of a host's area.
SMALL = 0.05
# Fractions of the mean density of sparser documents that are reserved for a host's room.
RESERVES = (0.25, 0.5, 0.75)
# What may enter a host, as a fraction of what would enter the host of the last rows if all
# stretches were taken evenly from both ends; of a document on n hosts it is at least 1 - MORE / n,
# as the host with the front sends this to n - 1 others.
SHARE_OF_FIRST, MORE = 0.88, 0.72


@dataclass
class _Left:
    """The rows ``first`` to ``last`` of a document, which no host has yet. Row x attends about
    ``density + slope * x`` keys, as if the number grew linearly."""

    start: int
    first: int
    last: int
    density: float
    slope: float
    both_ends: bool

    @staticmethod
    def of(documents: DocumentAreas, n: int) -> _Left:
        """All of document ``n``; slope and density are fitted to its two halves."""
        start, stop = documents.bounds[n : n + 2].tolist()
        tokens, area, slope = stop - start, float(documents.area[n]), 0.0
        if both_ends := bool(documents.uneven[n]):
            early = min(max(float(documents.early[n]) / area, 0.25), 0.75)
            slope = 4 * (1 - 2 * early) * area / tokens**2
        return _Left(start, 0, tokens, area / tokens - slope * tokens / 2, slope, both_ends)

    @property
    def tokens(self) -> int:
        return self.last - self.first

    @property
    def mean(self) -> float:
        """Mean area of a token, also in a stretch taken evenly from both ends."""
        return self.density + self.slope * (self.first + self.last) / 2

    @property
    def area(self) -> float:
        return self.tokens * self.mean

    def stretch(self, area: float, reserve: float, most: float) -> tuple[int, int]:
        """Tokens of a stretch with ``area`` beyond ``reserve`` for each of them, and how many are
        from the end. Its host receives at most ``most`` keys where the area allows it."""
        spare = self.mean - reserve
        tokens = int(min(area / spare, self.tokens)) if spare > 0 else self.tokens
        if tokens < LEAST_PART:
            tokens = self.tokens
        more = self.last - int(most)
        if self.slope > 0 and tokens < more < self.tokens:
            # area + reserve * more = density * more + slope * (sum of the numbers of the rows)
            rows = (area + (reserve - self.density) * more) / self.slope
            end = int((rows - (self.first + more / 2) * more) / (self.tokens - more))
            if end >= 0:
                return more, min(end, more // 2)
        return tokens, tokens // 2 if self.both_ends else 0

    def take(self, tokens: int, end: int) -> tuple[list[tuple[int, int]], float]:
        """Take a stretch off what is left; returns its ranges and its area."""
        before, first, last = self.area, self.first + tokens - end, self.last - end
        ranges = [(self.first, first), (last, self.last)]
        if first == last:
            ranges = [(self.first, self.last)]
        self.first, self.last = first, last
        return [(self.start + a, self.start + b) for a, b in ranges if a < b], before - self.area


@dataclass
class _Hosts:
    """What hosts hold so far.

    Attributes:
        room: int64[hosts], tokens that each lacks.
        lacks: float64[hosts], area that each lacks.
        entered: int64[hosts], tokens that each receives from others.
        ranges: host, start and stop of what they hold.
    """

    room: Ints
    lacks: Floats
    entered: Ints
    ranges: list[tuple[int, int, int]] = field(default_factory=list)

    def copy(self) -> _Hosts:
        return _Hosts(self.room.copy(), self.lacks.copy(), self.entered.copy(), self.ranges.copy())

    def densest(self, fit: Bools, mean: float) -> int | None:
        """The host, of those that ``fit``, that lacks the most area beyond what its room is worth
        at ``mean`` per token; None if none fits."""
        order = np.where(fit, self.lacks - mean * self.room, -np.inf)
        host = int(order.argmax())
        return host if fit[host] else None

    def take(self, host: int, left: _Left, tokens: int, end: int) -> None:
        """Put a stretch on a host."""
        self.entered[host] += left.last - tokens
        ranges, area = left.take(tokens, end)
        self.ranges += [(host, *each) for each in ranges]
        self.room[host] -= tokens
        self.lacks[host] -= area


def documents_on_hosts(documents: DocumentAreas, sizes: Ints, areas: Floats) -> Ints:
    """int64[n, 3] token ranges (host, start, stop), each of one document, sorted by start, that
    give each host ``sizes[host]`` tokens and about ``areas[host]``.

    Args:
        documents: at least one has an area.
        sizes: int64[hosts]; they sum to the tokens of ``documents``.
        areas: float64[hosts], above 0 where sizes are; they sum to the area of ``documents``.
    """
    falling = np.argsort(-documents.area, kind="stable")
    tokens, area = documents.tokens[falling], documents.area[falling]
    least = float(areas[sizes > 0].min())
    large = int(np.count_nonzero(area > SMALL * least))
    # Mean area per token of each document and those after it.
    mean = area[::-1].cumsum()[::-1] / tokens[::-1].cumsum()[::-1]
    each = falling.tolist(), tokens.tolist(), area.tolist(), mean.tolist()
    waiting = list(zip(*each, strict=True))
    is_sparse = area / tokens < area.sum() / tokens.sum()
    usual = float(area[is_sparse].sum() / max(tokens[is_sparse].sum(), 1))
    for part in RESERVES:
        hosts = _Hosts(sizes.copy(), (1 + OVER) * areas, 0 * sizes)
        for document, length, own, after in waiting[:large]:
            reserve = part * min(after, usual)
            spare = own - reserve * length - WHOLE_OVER * least
            fit = (hosts.room >= length) & (hosts.lacks - reserve * hosts.room >= spare)
            host = hosts.densest(fit, after)
            if host is None:
                hosts = _split(hosts, documents, document, reserve, WHOLE_OVER * least)
            else:
                hosts.take(host, _Left.of(documents, document), length, 0)
        if _fill_evenly(hosts, tokens[large:], area[large:], WHOLE_OVER * least):
            break
    _place_small(hosts, documents, waiting[large:])
    ranges = np.array(hosts.ranges, dtype=np.int64)
    return ranges[np.argsort(ranges[:, 1])]


def _place_small(
    hosts: _Hosts, documents: DocumentAreas, waiting: list[tuple[int, int, float, float]]
) -> None:
    """Step 2, for documents, their tokens, their area, and the area per token from there on."""
    bounds, room, lacks = documents.bounds.tolist(), hosts.room, hosts.lacks
    lacks[room == 0] = -np.inf  # never looked at again
    for document, length, own, after in waiting:
        best: int | None = int((lacks - after * room).argmax())
        if room[best] < length:
            best = hosts.densest(room >= length, after)
        if best is not None:
            hosts.ranges.append((best, bounds[document], bounds[document + 1]))
            room[best] -= length
            lacks[best] = lacks[best] - own if room[best] else -np.inf
            continue
        left = _Left.of(documents, document)
        while left.tokens:
            most = int(room.argmax())
            part = min(int(room[most]), left.tokens)
            hosts.take(most, left, part, part // 2 if left.both_ends else 0)


def _split(
    hosts: _Hosts, documents: DocumentAreas, document: int, reserve: float, over: float
) -> _Hosts:
    """``hosts`` with a document, which fits on none of them, split over few. Stretches are taken
    evenly from both ends if areas do not allow more from the front."""
    lacks, left = hosts.lacks - reserve * hosts.room, _Left.of(documents, document)
    most = float(lacks[hosts.room > 0].max())
    on = left.area / most if 0 < most < left.area else 1.0  # about so many hosts, or more
    lacking = lacks.min()
    for share in (max(SHARE_OF_FIRST, 1 - MORE / on), 1.0):
        split = hosts.copy()
        _fill(split, _Left.of(documents, document), reserve, over, share)
        if (split.lacks - reserve * split.room).min() >= min(-over, lacking):
            break
    return split


def _fill(hosts: _Hosts, left: _Left, reserve: float, over: float, share: float) -> None:
    """Put a document on hosts, one after the other; each takes all the area that it lacks."""
    most: float | None = None  # keys that may enter a host
    while left.tokens:
        lacks = hosts.lacks - reserve * hosts.room
        (rest,) = (
            (hosts.room >= left.tokens) & (lacks >= left.area - reserve * left.tokens - over)
        ).nonzero()
        if len(rest):
            host = min(rest.tolist(), key=lambda n: (hosts.entered[n], lacks[n]))
            hosts.take(host, left, left.tokens, 0)
            return
        host = int(np.where(hosts.room > 0, lacks, -np.inf).argmax())
        area = max(float(lacks[host]), 0.0)
        if most is None:
            most = share * (left.last - left.stretch(area, reserve, left.last)[0])
        tokens, end = left.stretch(area, reserve, most)
        if tokens > hosts.room[host]:
            tokens = int(hosts.room[host])
            end = tokens // 2 if left.both_ends else 0
        hosts.take(host, left, tokens, end)


def _fill_evenly(hosts: _Hosts, tokens: Ints, area: Floats, over: float) -> bool:
    """Whether small documents can make hosts even: whether the hosts that lack the least area for
    their room get no more than that plus ``over`` if they are given the sparsest documents."""
    (some,) = hosts.room.nonzero()
    if hosts.lacks.min() < -over:
        return False
    room, lacks = hosts.room[some], hosts.lacks[some] + over
    order, rising = np.argsort(lacks / room), np.argsort(area / tokens)
    before = np.append(0, tokens[rising].cumsum()), np.append(0.0, area[rising].cumsum())
    filled = np.interp(room[order].cumsum(), *before)
    return bool((filled <= lacks[order].cumsum()).all())
