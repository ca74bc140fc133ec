"""Keys that cross to a host once, however many of its ranks need them.

A range of keys that several ranks of a host need crosses to one of these, which passes it on to the
others:

    holder: rank 1 of host 0
                 cross: to rank 1 of host 1
                              spread: to all other ranks of host 1 that need it

The ranks that need a range take turns, step by step. In the first step it is the one that has the
holder's number in its host, if it needs the keys; else that number says which one it is. In the
second step it is the next one, and then the first one again. So a rank has messages for few ranks
of another host: messages cost the host time. (Messages between equal numbers may pass fewer
switches, too.) Holders have all numbers, so all ranks, with all their network cards, take part.

Each step has about the same part of all keys. So of two steps in a row a rank relays about as much
as it needs of one at the most; plans count how much (:mod:`.held`). The steps come again for each
group of heads. So if their number is odd, the last one is the turn of a third rank. Where
there is none, or one step alone, two ranks relay a half each.

A rank spreads its own keys with those that it relays: before, it copies them to the end of the same
buffer. So a step has one message from each rank of a host to each other.

Keys that only one rank of another host needs come straight to it. In the backward the same steps
are reversed: a rank adds up the gradients of the keys that it passed on, and sends the sums to the
holder.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ...arrays import Ints, columns
from ...layout import Layout
from ...mask.intervals import spread, touched, union
from ..moves import RECV, SEND, SEND_OFFSET, STEP, TOKEN0, TOKEN1, Moves, counts, located
from .exchange import NO_RANGES, Exchange, Relay
from .of_moves import exchanges, sender_order

SPREAD = 2654435761  # times which neighbouring numbers are far apart in their middle bits


def relayed(
    moves: Moves, steps: int, rank: int, unit_of: Ints, *, local: bool
) -> Iterator[Exchange]:
    """``rank``'s side of the moves of each step, where teams are of one rank each.

    Args:
        moves: all those into its unit, and all of its own keys.
        unit_of: int64[P], the host of each rank.
        local: whether what the rank holds itself is received too, as a copy.
    """
    ranks = len(unit_of)
    own = moves[:, RECV] == moves[:, SEND]
    alone, parts, every = relay_parts(moves[~own], unit_of, steps)
    inside = every[unit_of[every[:, RECV]] == unit_of[rank]].copy()
    # Offset of a part among those that its relaying rank has in the same step.
    relay = parts[:, STEP] * ranks + parts[:, RECV]
    order = np.lexsort((parts[:, TOKEN0], sender_order(parts), relay))
    size = (parts[:, TOKEN1] - parts[:, TOKEN0])[order]
    before = size.cumsum() - size
    offset = np.empty(len(parts), dtype=np.int64)
    offset[order] = before - before[relay[order].searchsorted(relay[order])]
    inside[:, SEND_OFFSET] = offset[inside[:, SEND_OFFSET]]
    # Relayed keys as if they came from other ranks than those that relay them.
    virtual = inside.copy()
    virtual[:, SEND] += ranks

    def of_rank(some: Moves, *, by_sender: bool = False) -> list[Exchange]:
        return exchanges(some, steps, rank, 1, local=True, by_sender=by_sender)

    straight = [alone, moves[own]] if local else [alone]
    wholes = of_rank(np.concatenate([*straight, virtual]))
    crossing, inner = of_rank(parts, by_sender=True), of_rank(inside)
    for whole, cross, goes in zip(wholes, crossing, inner, strict=True):
        comes_straight = whole.recv[:, 0] < ranks
        from_relays = whole.recv[~comes_straight] - np.array([ranks, 0, 0])
        goes_on = Exchange(goes.send, from_relays, NO_RANGES, whole.tokens)
        recv, relay_ = whole.recv[comes_straight], Relay(cross, goes_on)
        yield Exchange(whole.send, recv, whole.places, whole.tokens, 1, relay_)


def relay_parts(moves: Moves, unit_of: Ints, steps: int) -> tuple[Moves, Moves, Moves]:
    """Three tables from moves between ranks, in so many steps: those of keys that one rank of
    another unit needs; the parts of all others, as moves to the ranks that relay them, which are
    their holders inside a unit; and a move of each part from there to each rank that needs it, with
    the number of the part as its offset. ``unit_of``: int64[P], the host of each rank."""
    total, unit = int(moves[:, TOKEN1].max(initial=0)) + 1, unit_of[moves[:, RECV]]
    line = (moves[:, STEP] * (int(unit.max(initial=0)) + 1) + unit) * total
    start, stop = moves[:, TOKEN0] + line, moves[:, TOKEN1] + line
    bounds = np.unique(np.concatenate([start, stop]))
    x, segment = spread(bounds.searchsorted(start), bounds.searchsorted(stop))
    order = np.lexsort((moves[x, RECV], segment))
    x, segment = x[order], segment[order]
    needers = np.bincount(segment, minlength=len(bounds))
    begin = (np.cumsum(needers) - needers)[segment]  # the first row of its segment
    place = np.arange(len(x)) - begin  # among those that need it
    count, token = needers[segment], bounds[segment] - line[x]
    length = (bounds[1:] - bounds[:-1])[segment] if len(x) else segment
    number_of = number_in_unit(unit_of)
    holder = number_of[moves[x, SEND]]
    (alike,) = (number_of[moves[x, RECV]] == holder).nonzero()
    leading = np.full(len(bounds), -1)
    leading[segment[alike]] = place[alike]
    leading = np.where(leading[segment] < 0, holder, leading[segment])
    # Whose turn it is in a step, counted from the leading rank; of halves, of the first two.
    turn, step = (place - leading) % np.maximum(count, 1), moves[x, STEP]
    whose = np.where((step == steps - 1) & (steps % 2 == 1), 2, step % 2)
    halves = (steps == 1) | ((count == 2) & (steps % 2 == 1))
    near = unit_of[moves[x, SEND]] == unit[x]
    alone = ~near & (count == 1)
    relays = ~near & (count > 1) & np.where(halves, turn < 2, turn == whose)
    # The first half of a single key is empty. Which rank has the second is as if drawn, for keys of
    # one step may have any distance.
    at_holder = moves[x, SEND_OFFSET] + token - moves[x, TOKEN0]
    half = (turn + (at_holder * SPREAD >> 20)) % 2
    first = np.where(relays & halves, length * half // 2, 0)
    last = np.where(relays & halves, length * (half + 1) // 2, length)
    cut = moves[x]
    cut[:, SEND_OFFSET] += token + first - cut[:, TOKEN0]
    cut[:, TOKEN0], cut[:, TOKEN1] = token + first, token + last
    some = (relays & (first < last)) | (near & (place == 0))
    number = np.cumsum(some) - 1
    # Each part goes to all that need its segment: the rows from the segment's first one on.
    part, other = spread(begin[some], (begin + count)[some])
    parts = cut[some]
    parts[near[some], RECV] = parts[near[some], SEND]
    every = parts[part]
    every[:, SEND] = every[:, RECV]
    every[:, RECV] = cut[other, RECV]
    every[:, SEND_OFFSET] = number[some][part]
    return cut[alone], parts, every


def number_in_unit(unit_of: Ints) -> Ints:
    """int64[P]: the number of each rank in its unit, from 0. ``unit_of``: int64[P], rising."""
    return np.arange(len(unit_of)) - unit_of.searchsorted(unit_of)


class Crossing(NamedTuple):
    """Tokens that each rank sends and receives, int64[P, 2] each.

    Attributes:
        inside: from and to ranks of its host.
        across: from and to those of other hosts.
        hosts: int64[U], from how many other hosts a host has keys, where keys are relayed.
    """

    inside: Ints
    across: Ints
    hosts: Ints = np.zeros(1, dtype=np.int64)


def crossing(needed: Ints, layout: Layout, team_size: int, unit_of: Ints) -> Crossing:
    """What moves inside hosts and across where every rank fetches what it needs by itself.

    Args:
        needed: int64[n, 3]: team, start, stop; disjoint within a team.
        unit_of: int64[P], the host of each rank; those of a team have one.
    """
    every = counts(needed, layout, team_size)
    sent, received = _inside(needed, layout, team_size, unit_of)
    inside = columns(sent, received)
    return Crossing(inside, every - inside)


def relayed_crossing(needed: Ints, layout: Layout, unit_of: Ints) -> Crossing:
    """The same where keys cross once and are relayed. What each rank of a host receives of what
    crosses is taken to be in proportion to what it needs. It may be up to half of that where the
    holders have few numbers, as those of one document over a border of hosts; then the links of
    these holders are as busy."""
    plain = crossing(needed, layout, 1, unit_of)
    of_unit = union(unit_of[needed[:, 0]], needed[:, 1], needed[:, 2])
    moves = located(of_unit, layout.pieces)
    moves = moves[unit_of[moves[:, SEND]] != moves[:, RECV]]
    tokens = moves[:, TOKEN1] - moves[:, TOKEN0]
    ranks, units = len(unit_of), int(unit_of[-1]) + 1
    sent = np.bincount(moves[:, SEND], tokens, minlength=ranks).astype(np.int64)
    into = np.bincount(moves[:, RECV], tokens, minlength=units)
    wanted = np.bincount(unit_of, plain.across[:, 1], minlength=units)
    share = into / np.maximum(wanted, 1)
    received = np.rint(plain.across[:, 1] * share[unit_of]).astype(np.int64)
    spread_in = plain.across[:, 1] - received
    spread_out = (np.bincount(unit_of, spread_in) / np.bincount(unit_of))[unit_of]
    inside = plain.inside + columns(np.rint(spread_out).astype(np.int64), spread_in)
    pairs = np.unique(moves[:, RECV] * units + unit_of[moves[:, SEND]])
    hosts = np.bincount(pairs // units, minlength=units).astype(np.int64)
    return Crossing(inside, columns(sent, received), hosts)


def _inside(needed: Ints, layout: Layout, team_size: int, unit_of: Ints) -> tuple[Ints, Ints]:
    """int64[P] each: tokens that each rank sends to, and receives from, others of its unit."""
    ranks, total = layout.group_size, layout.total
    holder, start, stop, _ = layout.pieces.T
    # On one number line units follow one another, so that ranges meet pieces of their unit alone.
    line = unit_of[holder] * total
    pieces = columns(holder, start + line, stop + line)
    pieces = pieces[pieces[:, 1].argsort()]
    line = unit_of[needed[:, 0] * team_size] * total
    begin, end = needed[:, 1] + line, needed[:, 2] + line
    x, at = spread(*touched(begin, end, pieces[:, 1:]))
    tokens = np.minimum(end[x], pieces[at, 2]) - np.maximum(begin[x], pieces[at, 1])
    holder, reader = pieces[at, 0], needed[x, 0]
    own = holder // team_size == reader
    sent = np.bincount(holder, tokens * (team_size - own), minlength=ranks)
    received = np.bincount(reader, tokens, minlength=ranks // team_size).repeat(team_size)
    received = received - np.bincount(holder[own], tokens[own], minlength=ranks)
    return sent.astype(np.int64), received.astype(np.int64)
