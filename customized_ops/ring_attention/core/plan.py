"""From (mask, layouts) to what each rank receives and computes.

    mask + q_layout + k_layout --make_plan--> Plan --plan.rank(r)--> RankPlan --executor--> out, lse

A plan is a pure function of its arguments, in numpy: every rank makes the same one with no
collective and no device sync, and plans are cached by value. A token's key and value cross a link
once, and only where a slice needs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from . import assign
from .assign import COMPUTE, OWNER, ROW0, ROW1, Assignment
from .layout import Layout, LayoutError
from .mask import AttnMask
from .rank_plan import KEY0, KEY1, RECV, SEND, STAGE, RankPlan, Table, rank_plan
from .slices import K0, K1, Q0, Q1, Slices, normalise

# Up to here one gather and one merge-free kernel call beat overlapping (see make_plan).
GATHER_TOKENS = 16_384


@dataclass(frozen=True, eq=False)
class Plan:
    """What every rank moves and computes. Made by :func:`make_plan`."""

    mask: AttnMask
    q_layout: Layout
    k_layout: Layout
    assignment: Assignment
    kv_moves: Table
    gathered: bool
    _ranks: dict[int, RankPlan] = field(default_factory=dict, repr=False)

    @property
    def group_size(self) -> int:
        """Number of ranks."""
        return self.q_layout.group_size

    @property
    def n_stages(self) -> int:
        """Stages that each rank runs; all ranks run the same number, empty ones included."""
        return 1 if self.gathered else int(self.kv_moves[:, STAGE].max(initial=0)) + 1

    def rank(self, rank: int) -> RankPlan:
        """What ``rank`` does; made on first use."""
        if rank not in self._ranks:
            self._ranks[rank] = rank_plan(
                rank,
                self.mask.slices,
                self.assignment,
                self.kv_moves,
                self.k_layout,
                self.n_stages,
                gathered=self.gathered,
            )
        return self._ranks[rank]

    def kv_tokens(self) -> Table:
        """int64[P, 2]: key tokens that each rank sends and receives (each is one k and one v)."""
        return _moved(
            self.kv_moves[:, [SEND, RECV]],
            self.kv_moves[:, KEY1] - self.kv_moves[:, KEY0],
            self.group_size,
        )

    def q_tokens(self) -> Table:
        """int64[P, 2]: query rows that each rank gives away and takes in."""
        rows = self.assignment
        return _moved(rows[:, [OWNER, COMPUTE]], rows[:, ROW1] - rows[:, ROW0], self.group_size)

    def report(
        self,
        q_heads: int = 1,
        kv_heads: int = 1,
        head_dim: int = 1,
        v_dim: int | None = None,
        itemsize: int = 2,
    ) -> str:
        """The forward pass as a table: work, calls and bytes per rank.

        Bytes are what the rank sends and receives: keys, values, given rows and their output and
        lse. ``itemsize`` is bytes per element of q, k, v.
        """
        sent = self.forward_bytes(q_heads, kv_heads, head_dim, v_dim, itemsize)
        area = np.array([self.rank(r).area for r in range(self.group_size)])
        mean = area.mean()
        lines = [
            f"{self.mask.q_len} queries x {self.mask.k_len} keys, {self.mask.area} pairs, "
            f"{self.group_size} ranks, q {self.q_layout}, k {self.k_layout}, "
            + ("gathered" if self.gathered else f"{self.n_stages} stages"),
            f"{'rank':>4} {'tokens':>8} {'pairs':>14} {'of mean':>8} {'calls':>6} "
            f"{'kv in':>8} {'rows in':>8} {'sends':>10} {'receives':>10}",
        ]
        for r in range(self.group_size):
            share = area[r] / mean if mean else 1.0
            lines.append(
                f"{r:>4} {self.q_layout.sizes[r]:>8} {area[r]:>14} {share:>8.3f} "
                f"{self.rank(r).calls:>6} {self.kv_tokens()[r, 1]:>8} {self.q_tokens()[r, 1]:>8} "
                f"{format_bytes(sent[r, 0]):>10} {format_bytes(sent[r, 1]):>10}"
            )
        lines.append(f"imbalance (largest / mean): {area.max() / mean if mean else 1.0:.3f}")
        return "\n".join(lines)

    def forward_bytes(
        self, q_heads: int, kv_heads: int, head_dim: int, v_dim: int | None, itemsize: int
    ) -> Table:
        """int64[P, 2]: bytes that each rank sends and receives in the forward pass, batch 1."""
        v_dim = head_dim if v_dim is None else v_dim
        kv, q = self.kv_tokens(), self.q_tokens()
        stat = max(itemsize, 4)  # lse is fp32, fp64 beside fp64
        there = q * q_heads * head_dim * itemsize
        back = q[:, ::-1] * q_heads * (v_dim * itemsize + stat)
        return kv * kv_heads * (head_dim + v_dim) * itemsize + there + back

    def backward_bytes(
        self, q_heads: int, kv_heads: int, head_dim: int, v_dim: int | None, itemsize: int
    ) -> Table:
        """int64[P, 2]: bytes that each rank sends and receives in the backward pass, batch 1.

        k and v go out again, dk and dv come home in the accumulation dtype; rows of q, out and dout
        with their lse go out, dq comes home.
        """
        v_dim = head_dim if v_dim is None else v_dim
        kv, q = self.kv_tokens(), self.q_tokens()
        wide = max(itemsize, 4)
        keys = kv_heads * (head_dim + v_dim)
        there = kv * keys * itemsize
        there += q * q_heads * ((head_dim + 2 * v_dim) * itemsize + wide)
        back = kv[:, ::-1] * keys * wide + q[:, ::-1] * q_heads * head_dim * wide
        return there + back


def format_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def make_plan(
    mask: AttnMask,
    q_layout: Layout,
    k_layout: Layout | None = None,
    *,
    assignment: str = "balanced",
    stages: int | None = None,
) -> Plan:
    """Plan attention of ``mask`` over ranks that hold q and k, v as the layouts say.

    Args:
        mask: over the whole sequences.
        q_layout, k_layout: where tokens lie; ``k_layout`` is ``q_layout`` if None.
        assignment: who computes a row. ``"owner"``: who holds it; ``"balanced"``: as owner, but
            ranks with too much work give rows away; ``"zigzag"``: as if q were laid out zigzag.
        stages: 0 gathers all keys a rank needs and attends them at once; n >= 1 attends the local
            keys first, then the remote ones in n steps by ring distance, the next step's keys
            arriving meanwhile. None chooses: 0 up to 16,384 keys and 1 beyond, which is what two
            H200s over NVLink do fastest.
    Raises:
        LayoutError: a layout's total is not the mask's length, or the groups differ in size.
        ValueError: unknown ``assignment`` or negative ``stages``.
    """
    k_layout = q_layout if k_layout is None else k_layout
    if (q_layout.total, k_layout.total) != (mask.q_len, mask.k_len):
        raise LayoutError(
            f"the mask is {mask.q_len} queries x {mask.k_len} keys, but the layouts hold "
            f"{q_layout.total} and {k_layout.total} tokens"
        )
    if q_layout.group_size != k_layout.group_size:
        raise LayoutError(f"q lies on {q_layout.group_size} ranks and k on {k_layout.group_size}")
    if stages is not None and stages < 0:
        raise ValueError(f"stages must be 0 or more, got {stages}")
    return _make_plan(mask, q_layout, k_layout, assignment, stages)


@lru_cache(maxsize=256)
def _make_plan(
    mask: AttnMask, q_layout: Layout, k_layout: Layout, assignment: str, stages: int | None
) -> Plan:
    match assignment:
        case "owner":
            rows = assign.owner_computes(q_layout)
        case "balanced":
            rows = assign.balanced(mask, q_layout)
        case "zigzag":
            rows = assign.as_laid_out(q_layout, Layout.zigzag(q_layout.total, q_layout.group_size))
        case _:
            raise ValueError(f"assignment must be owner, balanced or zigzag, got {assignment!r}")
    if stages is None:
        stages = 0 if mask.k_len <= GATHER_TOKENS else 1
    needed = _needed_keys(mask.slices, rows, q_layout.group_size)
    moves = _locate(needed, k_layout)
    remote = moves[moves[:, RECV] != moves[:, SEND]]
    gathered = stages == 0 and len(remote) > 0
    if not gathered:
        remote[:, STAGE] = _ring_stage(remote, q_layout.group_size, max(stages, 1))
        moves = remote
    return Plan(mask, q_layout, k_layout, rows, moves, gathered)


def _needed_keys(slices: Slices, rows: Assignment, ranks: int) -> Table:
    """int64[n, 3]: rank, first key, end; the keys that each rank's rows attend, merged."""
    parts = np.repeat(slices[None, :, :], len(rows), axis=0)
    np.maximum(parts[:, :, Q0], rows[:, None, ROW0], out=parts[:, :, Q0])
    np.minimum(parts[:, :, Q1], rows[:, None, ROW1], out=parts[:, :, Q1])
    rank = np.repeat(rows[:, COMPUTE], len(slices))
    flat = parts.reshape(-1, 6)
    occupied = flat[:, Q0] < flat[:, Q1]
    flat, rank = flat[occupied], rank[occupied]
    tight = normalise(flat)
    assert len(tight) == len(flat), "a nonempty row range of a normalised slice has keys"
    # One number line: rank r's keys lie at r * stride, so a single sweep merges all ranks.
    stride = int(slices[:, K1].max(initial=0)) + 1
    start = tight[:, K0] + rank * stride
    order = np.argsort(start, kind="stable")
    start, stop = start[order], (tight[:, K1] + rank * stride)[order]
    reach = np.maximum.accumulate(stop) if len(stop) else stop
    first = np.ones(len(start), dtype=bool)
    first[1:] = start[1:] > reach[:-1]
    heads = np.flatnonzero(first)
    ends = np.maximum.reduceat(stop, heads) if len(heads) else stop
    begin = start[heads]
    return np.stack([begin // stride, begin % stride, ends - begin // stride * stride], axis=1)


def _locate(needed: Table, layout: Layout) -> Table:
    """Cut the needed key ranges by who holds them: rows of Plan.kv_moves, stage 0."""
    pieces = layout.pieces
    key0 = np.maximum(needed[:, None, 1], pieces[None, :, 1])
    key1 = np.minimum(needed[:, None, 2], pieces[None, :, 2])
    n, p = np.nonzero(key0 < key1)
    key0, key1 = key0[n, p], key1[n, p]
    offset = pieces[p, 3] + key0 - pieces[p, 1]
    return np.stack([needed[n, 0], pieces[p, 0], key0, key1, offset, np.zeros_like(key0)], axis=1)


def _ring_stage(moves: Table, ranks: int, stages: int) -> Table:
    """Stage 1..stages by ring distance from receiver to sender; stage 0 is the local one."""
    distance = (moves[:, SEND] - moves[:, RECV]) % ranks
    return 1 + (distance - 1) * stages // max(ranks - 1, 1)


def _moved(ends: Table, count: Table, ranks: int) -> Table:
    away = ends[:, 0] != ends[:, 1]
    return np.stack(
        [np.bincount(ends[away, n], weights=count[away], minlength=ranks) for n in (0, 1)], axis=1
    ).astype(np.int64)
