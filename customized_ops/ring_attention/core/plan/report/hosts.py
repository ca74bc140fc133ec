"""What a plan over several hosts moves between them, and what ranks hold of others' keys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...arrays import Ints
from ...mask.intervals import members, union
from ...mask.slices import cut_keys, cut_rows
from ..bounds import key_sums, most_pairs, row_sums
from ..exchanges.held import held_in_steps, tokens_by_rank
from ..heads import Sizes, TokenBytes
from ..moves import RECV, SEND, TOKEN0, TOKEN1, located
from ..plan_value import PlanValue
from ..simulate.counts import arriving, ways

# At how many numbers of keys the least number of rows is looked for.
CELLS = 1 << 12


@dataclass(frozen=True)
class HostFigures:
    """Numbers of keys in the forward pass, of all heads; where ranks share out heads, keys of all
    heads with as many bytes.

    Attributes:
        tokens_into_host: that cross into the host with the most, counted as often as they cross.
        tokens_into_host_at_least: the distinct ones among them.
        received_tokens_at_once: the most that a rank holds at once, as keys of all heads with as
            many bytes. Messages from which they are put together, and what is relayed, are counted
            where there is a bound or keys are relayed.
        received_rows_at_once: the most rows of others that a rank holds, all of them at once,
            without those of its own team.
    """

    tokens_into_host: int
    tokens_into_host_at_least: int
    received_tokens_at_once: int
    received_rows_at_once: int

    def received_bytes_at_once(self, sizes: Sizes) -> int:
        """Bytes of these keys and values, and of rows and the wide sums of their results, batch 1.
        In the backward gradients take about as much, or twice as much where they are wide."""
        keys = self.received_tokens_at_once * int(sizes.kv_bytes(max(sizes.kv_heads, 1)))
        return keys + self.received_rows_at_once * int(sizes.held_row_bytes(sizes.q_heads))


def host_figures(plan: PlanValue) -> HostFigures:
    """The figures of ``plan``; where it has no topology all ranks are on one host."""
    into, least = 0, 0
    if plan.topology is not None:
        host_of = plan.topology.host_of
        across = plan.crossings[0].across[:, 1]
        needed = plan.kv_needed
        every = union(host_of[needed[:, 0] * plan.team_size], needed[:, 1], needed[:, 2])
        distinct = located(every, plan.k_layout.pieces)
        distinct = distinct[host_of[distinct[:, SEND]] != distinct[:, RECV]]
        tokens = distinct[:, TOKEN1] - distinct[:, TOKEN0]
        into = int(np.bincount(host_of, across).max()) // plan.team_size
        least = int(np.bincount(distinct[:, RECV], tokens, minlength=1).max())
    rows = -(-plan.rows_of_others // plan.team_size)
    return HostFigures(max(into, least), least, _received_at_once(plan), rows)


def host_bytes(
    plan: PlanValue, sizes: Sizes, reduce_itemsize: int | None = None
) -> list[tuple[int, int]]:
    """Of the forward and of the backward of ``plan``, which has a topology, batch 1: bytes that
    enter the host that is busiest in the forward, and bytes that have to, see :func:`least_into`.
    """
    assert plan.topology is not None
    heads = plan.heads_of_ranks(sizes.q_heads, sizes.kv_heads)
    home = plan.home_itemsize(sizes, reduce_itemsize)
    keys, rows = (crossing.across for crossing in plan.crossings)
    into = []
    for of in (TokenBytes.forward(sizes, heads), TokenBytes.backward(sizes, heads, home)):
        received = keys[:, 1] * of.key_out + keys[:, 0] * of.key_back
        received = received + rows[:, 1] * of.row_out + rows[:, 0] * of.row_back
        into.append(np.bincount(plan.topology.host_of, received))
    busiest = int(into[0].argmax())
    every = np.array([[sizes.q_heads, sizes.kv_heads]])
    wholes = TokenBytes.forward(sizes, every), TokenBytes.backward(sizes, every, home)
    return [
        (int(entering[busiest]), least_into(plan, busiest, of))
        for entering, of in zip(into, wholes, strict=True)
    ]


def least_into(plan: PlanValue, host: int, of: TokenBytes) -> int:
    """Bytes that ``host`` has to receive in a pass, in this layout and with as many pairs as it
    computes, whichever pairs these are: what it attends of others, and what others make of its own
    tokens.

    Say it receives x keys and y rows of others. The pairs that it can compute are of its own rows
    and keys, a given number; of own rows and other keys, at most those of the x keys that have
    most; of other rows and own keys, at most those of the y rows that have most; and of other rows
    and keys, at most x * y. So the cheapest x and y that admit as many pairs are a bound. Between
    two values of x that are tried, it takes no fewer keys than the smaller and no fewer rows than
    the larger needs. Ranks that share out heads compute a pair together, with all its heads: so
    each token counts once with all heads.

    For the pairs of its own rows that it does not compute, something comes back for these rows, and
    in a backward for its own keys too: at least once, for as few tokens as have that many pairs.

    Args:
        of: bytes of a token with all heads, int64[1].
    """
    assert plan.topology is not None
    mask, host_of = plan.mask, plan.topology.host_of
    own_q, own_k = (
        layout.pieces[host_of[layout.pieces[:, 0]] == host, 1:3]
        for layout in (plan.q_layout, plan.k_layout)
    )
    own_rows = cut_rows(mask.slices, own_q)[2]
    own_keys = cut_keys(mask.slices, own_k)[2]
    computed = int(plan.area[host_of == host].sum()) // plan.team_size
    of_keys, of_rows = key_sums(own_rows, mask.k_len), row_sums(own_keys, mask.q_len)
    held, rows_held = members(*own_k.T), members(*own_q.T)
    here = int(of_keys[held].sum())
    key, row, key_home, row_home = (
        int(each[0]) for each in (of.key_out, of.row_out, of.key_back, of.row_back)
    )
    other_keys, other_rows = np.delete(of_keys, held), np.delete(of_rows, rows_held)
    fetched = _cheapest(most_pairs(other_keys), most_pairs(other_rows), computed - here, key, row)
    # Pairs of own rows over all keys, and of own keys with the rows of others.
    rows = most_pairs(row_sums(own_rows, mask.q_len)[rows_held])
    keys = most_pairs((key_sums(own_keys, mask.k_len) - of_keys)[held])
    nothing = np.zeros(1, dtype=np.int64)
    if key_home == 0:
        return fetched + _cheapest(nothing, rows, int(rows[-1]) - computed, 0, row_home)
    left = int(rows[-1] + keys[-1]) - computed
    return fetched + _cheapest(keys, rows, left, key_home, row_home, together=False)


def _cheapest(
    keys: Ints, rows: Ints, wanted: int, key: int, row: int, *, together: bool = True
) -> int:
    """A lower bound on the bytes of x keys and y rows with ``wanted`` pairs: ``keys[x]``,
    ``rows[y]`` and, with ``together``, ``x * y``. ``key`` and ``row`` are the bytes of each."""
    if wanted <= 0:
        return 0
    x = np.unique(np.linspace(0, len(keys) - 1, CELLS).astype(np.int64))
    y = _fewest(rows, x * together, wanted - keys[x])
    before = np.append(0, x[:-1] + 1)
    return int((key * before + row * y)[y < len(rows)].min())


def _fewest(rows: Ints, keys: Ints, wanted: Ints) -> Ints:
    """The least y with ``rows[y] + keys * y >= wanted``; ``len(rows)`` where there is none."""
    low, high = np.zeros_like(keys), np.full_like(keys, len(rows))
    while (left := low < high).any():
        middle = np.minimum((low + high) // 2, len(rows) - 1)
        enough = rows[middle] + keys * middle >= wanted
        low = np.where(left & ~enough, middle + 1, low)
        high = np.where(left & enough, middle, high)
    return low


def _received_at_once(plan: PlanValue) -> int:
    """See :class:`HostFigures`. Copies of own keys that a rank passes on are not counted."""
    teams, share = plan.group_size // plan.team_size, plan.head_groups * plan.team_size
    if plan.held_keys == 0 and not plan.relays:
        return -(-int(plan.kv_tokens()[:, 1].max(initial=0)) // plan.team_size)
    unit_of, first, most = np.arange(teams), 0 if plan.gathered else 1, 0
    if plan.arrivals is not None:
        unit_of = plan.arrivals.unit_of[:: plan.team_size]
    for unit in range(int(unit_of[-1]) + 1):
        moves = arriving(plan, unit_of, unit)
        passed = ways(plan, moves)[1] if plan.relays else moves[:0]
        keys = tokens_by_rank(moves, teams, plan.n_stages, own=plan.team_size > 1)[:, first:]
        relayed = tokens_by_rank(passed, teams, plan.n_stages)[:, first:]
        most = max(most, int(held_in_steps(keys, relayed, plan.head_groups).max(initial=0)))
    return -(-most // share)
