"""How many keys of others a rank holds at once, where these arrive in steps.

While the keys of a step are attended, those of the next arrive. They are put together from
messages, which are freed then. Where keys are relayed (:mod:`.relays`), what a rank passes on of a
step is held, too: it has arrived one step before the others receive it, and is freed when these
keys are there.
"""

from __future__ import annotations

import numpy as np

from ...arrays import Ints, columns
from ...layout import Layout
from ...mask.intervals import spread, touched
from ..moves import RECV, SEND, STEP, TOKEN0, TOKEN1, Moves, tokens_of_kinds
from .relays import number_in_unit

TURNS = 3  # the most ranks that take turns to relay a range: two, and in the last of an odd number
# of steps a third


def held_in_steps(received: Ints, relayed: Ints, head_groups: int) -> Ints:
    """int64[steps]: the most keys that a rank holds of others while those of a step are put
    together, or attended; of one group of heads.

    Args:
        received, relayed: int64[n, steps], of some ranks, in each step of one group. After the last
            step of a group comes the first of the next.
    """
    times, steps = min(head_groups, 3), received.shape[1]
    both = (np.tile(each, times) for each in (received, relayed))
    keys, passed = (np.pad(each, ((0, 0), (0, 2))) for each in both)
    together = 2 * keys[:, :-2] + passed[:, :-2] + passed[:, 1:-1]
    attended = keys[:, :-2] + keys[:, 1:-1] + passed[:, 1:-1] + passed[:, 2:]
    most: Ints = np.maximum(together, attended).max(axis=0, initial=0)
    return most.reshape(times, steps).max(axis=0)


def relayed_part(needed: Ints, layout: Layout, unit_of: Ints, received: Ints) -> float:
    """What a rank relays of two steps in a row, as a part of the most that a rank receives in one:
    about 2 / 8 where all 8 ranks of a host need the same keys, and never more than 1.

    Args:
        needed: int64[n, 3]: rank, start, stop of the keys that it attends. layout: of the keys.
        unit_of: int64[P], the host of each rank. received: int64[P], keys that each receives.
    """
    number_of = number_in_unit(unit_of)
    # On one number line hosts follow one another. Every range between two edges is needed by the
    # same ranks of a host.
    line = unit_of[needed[:, 0]] * layout.total
    edges = np.unique(np.concatenate([needed[:, 1] + line, needed[:, 2] + line]))
    first, last = (edges.searchsorted(each + line) for each in (needed[:, 1], needed[:, 2]))
    x, at = spread(first, last)
    order = np.lexsort((needed[x, 0], at))
    rank, at = needed[x[order], 0], at[order]
    count = np.bincount(at, minlength=len(edges))
    begin = count.cumsum() - count
    place_of = np.tile(np.arange(number_of.max() + 1), (len(edges), 1))
    place_of[at, number_of[rank]] = np.arange(len(at)) - begin[at]
    (several,) = (count > 1).nonzero()
    tokens = _crossing_by_number(edges, several, layout, unit_of, number_of)
    passed = np.zeros((len(unit_of), TURNS))
    # Turns are those of :func:`.relays.relay_parts`. Two ranks relay a half each, or all in turns,
    # which is as much in two steps.
    of_two = (count[several] == 2)[:, None]
    for turn in range(TURNS):
        for other in (0, 1):
            place = (place_of[several] + np.where(of_two, other, turn)) % count[several, None]
            whose = rank[begin[several, None] + place]
            np.add.at(passed[:, turn], whose, tokens / 2)
    pairs = (passed + np.roll(passed, 1, axis=1)).max(axis=1)
    most = int(received.max(initial=0))
    return min(float((2 * received + pairs).max() / most - 2), 1.0) if most else 0.0


def _crossing_by_number(
    edges: Ints, several: Ints, layout: Layout, unit_of: Ints, number_of: Ints
) -> Ints:
    """int64[n, H]: of the ranges from the edges ``several`` to the next ones, the keys that ranks
    of other hosts hold, by the number of these in their hosts."""
    (holder, start, stop, _), total = layout.pieces.T, layout.total
    begin, end = edges[several], edges[np.minimum(several + 1, len(edges) - 1)]
    offset = begin // total * total
    ranges = columns(begin - offset, end - offset)
    kinds = int(number_of.max()) + 1
    tokens = tokens_of_kinds(ranges, layout.pieces[:, 1:3], number_of[holder], kinds)
    own = columns(holder, start + unit_of[holder] * total, stop + unit_of[holder] * total)
    own = own[own[:, 1].argsort()]
    x, at = spread(*touched(begin, end, own[:, 1:]))
    inside = np.minimum(end[x], own[at, 2]) - np.maximum(begin[x], own[at, 1])
    np.subtract.at(tokens, (x, number_of[own[at, 0]]), inside)
    return tokens


def tokens_by_rank(moves: Moves, ranks: int, steps: int, *, own: bool = False) -> Ints:
    """int64[ranks, steps]: tokens that each rank (or team) receives in each step; its ``own`` count
    where teams share out heads, as the other ranks of a team send each its share of them."""
    if not own:
        moves = moves[moves[:, RECV] != moves[:, SEND]]
    place = moves[:, RECV] * steps + moves[:, STEP]
    tokens = np.bincount(place, moves[:, TOKEN1] - moves[:, TOKEN0], ranks * steps)
    return tokens.astype(np.int64).reshape(ranks, steps)
