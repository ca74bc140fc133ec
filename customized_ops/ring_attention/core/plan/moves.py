"""Which tokens move between ranks, given which tokens each team needs and who holds them.

What a team needs follows from who computes what (``work``). That is a few ranges of tokens, but a
layout may have thousands of pieces (striped, or zigzag documents), and each piece is a move of its
own for each team. So moves are listed for one rank at a time; for all ranks there are only counts.
"""

from __future__ import annotations

import numpy as np

from ..arrays import Bools, Ints, columns
from ..layout import Layout
from ..mask.intervals import spread, touched, union
from ..rounding import in_steps

# Columns of moves: the team that receives, the rank that sends, global tokens, offset of the first
# at the sender. Every rank of a team receives its share of the heads of these tokens.
# The step in which they move counts from 0.
RECV, SEND, TOKEN0, TOKEN1, SEND_OFFSET, STEP = range(6)
LENGTHS = 8  # of ranges that are rounded, between powers of two
Moves = Ints  # int64[n, 6]
NO_MOVES: Moves = np.zeros((0, 6), dtype=np.int64)


def located(needed: Ints, pieces: Ints) -> Moves:
    """Cut the token ranges that teams need by the ranks that hold them.

    Args:
        needed: int64[n, 3]: team, start, stop; disjoint within a team.
        pieces: rows of ``Layout.pieces``, all or some.
    Returns:
        int64[m, 6]: the team that needs, the rank that holds, global tokens, offset at the holder,
        and step 0.
    """
    n, p = spread(*touched(needed[:, 1], needed[:, 2], pieces[:, 1:3]))
    token0 = np.maximum(needed[n, 1], pieces[p, 1])
    token1 = np.minimum(needed[n, 2], pieces[p, 2])
    offset = pieces[p, 3] + token0 - pieces[p, 1]
    return columns(needed[n, 0], pieces[p, 0], token0, token1, offset, np.zeros_like(offset))


def rounded(needed: Ints, layout: Layout) -> Ints:
    """The ranges that ranks need, longer where they reach beyond a rank's own tokens: they are of
    few lengths, as far as there are tokens.

    Args:
        needed: see :func:`located`.
        layout: of one piece for each rank.
    """
    longer, own = needed.copy(), {rank: (start, stop) for rank, start, stop, _ in layout.pieces}
    for n, (rank, start, stop) in enumerate(needed.tolist()):
        length, (first, last) = in_steps(stop - start, LENGTHS), own[rank]
        if start < first:
            longer[n, 1] = max(stop - length, 0)
        elif stop > last:
            longer[n, 2] = min(start + length, layout.total)
    return union(*longer.T)


def own_can_follow(moves: Moves, layout: Layout) -> bool:
    """Whether ranks can have what they receive before their own tokens, and these in the order in
    which they hold them, with all documents together. So it is where a rank receives one range of
    tokens at most, which its first token follows, and all its others rise. In global order its own
    tokens would be scattered around what it receives.

    Args:
        moves: of all ranks, with what they hold themselves.
    """
    others = moves[moves[:, SEND] != moves[:, RECV]]
    for rank in range(layout.group_size):
        held = layout.pieces[layout.pieces[:, 0] == rank]
        held = held[held[:, 3].argsort(kind="stable")]
        stops = others[others[:, RECV] == rank, TOKEN1].tolist()
        if (np.diff(held[1:, 1]) < 0).any() or (stops and stops != held[:1, 1].tolist()):
            return False
    return True


def tokens_of_kinds(ranges: Ints, pieces: Ints, kind: Ints, kinds: int) -> Ints:
    """int64[n, kinds]: how many tokens of each range are in pieces of each kind.

    Args:
        ranges: int64[n, 2], starts and stops.
        pieces: int64[p, 2], the same of pieces that follow one another. kind: int64[p], of each,
            less than ``kinds``.
    """
    start, stop = pieces.T
    before = np.zeros((len(pieces) + 1, kinds), dtype=np.int64)
    before[np.arange(len(pieces)) + 1, kind] = stop - start
    np.cumsum(before, axis=0, out=before)

    def up_to(token: Ints) -> Ints:
        """Tokens of each kind before each token."""
        at = np.minimum(stop.searchsorted(token, side="right"), len(pieces) - 1)
        found = before[at]
        found[np.arange(len(token)), kind[at]] += token - start[at]
        return found

    return up_to(ranges[:, 1]) - up_to(ranges[:, 0])


def of_rank(needed: Ints, own: Bools, layout: Layout, rank: int) -> Moves:
    """The moves that ``rank`` takes part in: those of ``own``, bool[n], which its team or its host
    needs, and what others need from it."""
    pieces = layout.pieces
    into = located(needed[own], pieces)
    out = located(needed[~own], pieces[pieces[:, 0] == rank])
    return np.concatenate([into, out])


def counts(needed: Ints, layout: Layout, team_size: int) -> Ints:
    """int64[P, 2]: tokens that each rank sends and receives, for one share of the heads each.

    A rank receives what its team needs less what it holds of that, and sends each of its tokens to
    all ranks of the teams that need it, except itself.
    """
    ranks, pieces = layout.group_size, layout.pieces
    holder, starts, stops, _ = pieces.T
    team, start, stop = needed.T
    needs = np.bincount(team, stop - start, minlength=ranks // team_size)
    # Tokens of a piece that its own team needs, and tokens times all teams that need them. On one
    # number line, teams follow one another, and after them come all teams together.
    line, own, every = team * layout.total, holder // team_size * layout.total, ranks * layout.total
    before = _before(
        np.concatenate([start + line, np.sort(start) + every]),
        np.concatenate([stop + line, np.sort(stop) + every]),
        np.concatenate([own + starts, every + starts, own + stops, every + stops]),
    ).reshape(2, 2, -1)
    held, asked = (np.bincount(holder, tokens, minlength=ranks) for tokens in before[1] - before[0])
    sent = asked * team_size - held
    received = needs.repeat(team_size) - held
    return columns(sent, received).astype(np.int64)


def sizes(needed: Ints, tokens: Ints, size: Ints, team_size: int) -> Ints:
    """int64[P, 2]: :func:`counts` in other units, where shares of the heads differ.

    Args:
        tokens: what :func:`counts` gave.
        size: int64[P]: that of a token as each rank receives it; the same for the n-th rank of
            every team.
    """
    if team_size == 1:
        return tokens * size[0]
    length = needed[:, 2] - needed[:, 1]
    needs = np.bincount(needed[:, 0], length, minlength=len(tokens) // team_size).astype(np.int64)
    held = np.repeat(needs, team_size) - tokens[:, 1]
    asked = (tokens[:, 0] + held) // team_size
    sent = asked * size[:team_size].sum() - held * size
    return columns(sent, tokens[:, 1] * size)


def _before(starts: Ints, stops: Ints, token: Ints) -> Ints:
    """How much of the ranges, added up, is before each token.

    Args:
        starts, stops: of the ranges, each sorted.
    """
    before = token * 0
    # Each range that starts before the token adds token - start, each that stops takes back.
    for ends, sign in ((starts, 1), (stops, -1)):
        count = ends.searchsorted(token)
        sums = np.zeros(len(ends) + 1, dtype=np.int64)
        ends.cumsum(out=sums[1:])
        before += sign * (count * token - sums[count])
    return before


def traffic(needed: Ints, layout: Layout, team_size: int) -> Ints:
    """int64[P, P]: tokens that rank [s, r] sends to rank r, for one share of the heads."""
    size = layout.group_size
    moves, receiver = to_each(located(needed, layout.pieces), team_size, local=False)
    links, count = moves[:, SEND] * size + receiver, moves[:, TOKEN1] - moves[:, TOKEN0]
    return np.bincount(links, count, minlength=size**2).astype(np.int64).reshape(size, size)


def to_each(moves: Moves, team_size: int, *, local: bool) -> tuple[Moves, Ints]:
    """The moves to each rank of the teams that receive them, and these ranks; with ``local`` also
    those to a rank that holds the tokens itself."""
    if team_size == 1:
        to = moves[:, RECV]
    else:
        to = (moves[:, [RECV]] * team_size + np.arange(team_size)).reshape(-1)
        moves = np.repeat(moves, team_size, axis=0)
    if local:
        return moves, to
    away = to != moves[:, SEND]
    return moves[away], to[away]


def ring_stage(moves: Moves, ranks: int, stages: int, team_size: int) -> Ints:
    """Stage 1..stages of each move by ring distance from the receiving to the sending team; 0 for
    what a rank holds itself, if it shares heads with nobody."""
    teams = ranks // team_size
    distance = (moves[:, SEND] // team_size - moves[:, RECV]) % teams
    stage = 1 + np.maximum(distance - 1, 0) * stages // max(teams - 1, 1)
    return np.where((distance == 0) & (team_size == 1), 0, stage)


def by_distance(moves: Moves, ranks: int, steps: int, team_size: int, *, local: bool) -> Moves:
    """``moves``, to arrive in ``steps`` steps by ring distance, without what ranks hold themselves;
    with ``local`` all of them, at once."""
    if local:
        return moves
    moves[:, STEP] = ring_stage(moves, ranks, steps, team_size) - 1
    return moves[moves[:, STEP] >= 0]


def own_and_others(start: Ints, stop: Ints, ranks: Ints, layout: Layout) -> tuple[Bools, Bools]:
    """bool[n, m] each: whether each range of tokens, int64[n], has some that each of its ranks,
    int64[n, m], holds, and some that others hold."""
    pieces, by_holder = layout.pieces, layout.pieces_by_holder
    first, last = touched(start, stop, pieces[:, 1:3])
    first, last, holder = first[:, None], last[:, None], ranks * len(pieces)
    own = by_holder.searchsorted(holder + last) - by_holder.searchsorted(holder + first)
    return own > 0, own < last - first
