"""A rank's share of the heads, groups of it, and the kernel calls of each stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ..comm.transfer_side import ROWS, STATS, Dims
from ..index_table import IndexTable, send
from ..kernels import Kernel, Pairs, Scoring, Tokens
from ..merge.merge import Sum, unattended
from ..plan import Plan
from ..plan.heads import head_shares
from ..plan.rank_plan import Range
from ..tape import computed, launch
from .call_pairs import stage_pairs


class RankHeads:
    """The heads that one rank computes: the n-th of a team has the n-th share.

    ``rows``, ``stats`` and ``keys`` are the dims, with the shares, of tensors shaped like q, like
    lse, and like k or v. ``whole`` says whether the share is all heads.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        q: Tensor,
        k: Tensor,
        scoring: Scoring,
        key_positions: Tensor | None,
    ) -> None:
        self._plan, self._rank, self.device = plan, rank, q.device
        self._key_positions = key_positions
        self._first_head, self.whole = 0, plan.team_size == 1
        self.rows, self.stats, self.keys = ROWS, STATS, ROWS
        if not self.whole:
            heads = q.shape[ROWS.heads], k.shape[ROWS.heads]
            self.rows, self.stats, self.keys = _dims(*heads, plan.team_size)
            self._first_head, _ = self.rows.shares[rank % plan.team_size]
        self.scoring = self._scoring_of_heads(scoring)

    def _scoring_of_heads(self, scoring: Scoring) -> Scoring:
        if scoring.alibi_slopes is None or self.whole:
            return scoring
        return replace(scoring, alibi_slopes=self.of(scoring.alibi_slopes, self.stats))  # [b, h]

    def groups(self, q: Tensor, k: Tensor) -> list[RankHeads]:
        """The groups of heads whose keys arrive one after the other, each as a share that every
        rank has; this share alone where there is one group. q and k have all heads."""
        q_heads, kv_heads = q.shape[ROWS.heads], k.shape[ROWS.heads]
        count = min(self._plan.head_groups, kv_heads)
        if count == 1:
            return [self]
        assert self.whole, "heads are split between ranks or in groups, not both"
        dims = _dims(q_heads, kv_heads, count)
        return [
            self._group(*(dim._replace(shares=dim.shares[n : n + 1]) for dim in dims))
            for n in range(count)
        ]

    def _group(self, rows: Dims, stats: Dims, keys: Dims) -> RankHeads:
        group = copy(self)
        group.whole, group.rows, group.stats, group.keys = False, rows, stats, keys
        ((group._first_head, _),) = rows.shares
        group.scoring = group._scoring_of_heads(self.scoring)
        return group

    def of(self, tensor: Tensor, dims: Dims) -> Tensor:
        """The share of ``tensor``, a view."""
        return dims.share(tensor, self._rank)

    def query_dims(self, count: int) -> list[Dims]:
        """The dims of q alone (``count`` 1), or of dout, q, out, lse and perhaps dlse."""
        return [self.rows] * min(count, 3) + [self.stats] * (count - 3)

    def of_queries(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The share of each of these tensors; see :meth:`query_dims`."""
        if not self.rows.shares:
            return tensors
        return [self.of(t, d) for t, d in zip(tensors, self.query_dims(len(tensors)), strict=True)]

    def among_all(self, out: Tensor, lse: Tensor, q: Tensor, v_dim: int) -> tuple[Tensor, Tensor]:
        """The share's results in tensors of all heads; other heads as if they attended nothing."""
        all_out, all_lse = unattended(q, v_dim, out.dtype)
        launch(Tensor.copy_, self.of(all_out, self.rows), out)
        launch(Tensor.copy_, self.of(all_lse, self.stats), lse)
        return all_out, all_lse

    def add(self, total: Sum, part: Tensor, dims: Dims, rows: slice | None = None) -> None:
        """Add a part, of these heads and a range of tokens, to a sum of all, and take ownership of
        it."""
        if self.whole:
            total.add(part, rows)
        else:
            here = total.wide() if rows is None else total.wide()[:, rows]
            launch(Tensor.add_, self.of(here, dims), part)

    def call(self, stage: int, remote: bool) -> tuple[Range, Pairs, Tokens | None]:
        """The rows that a stage's kernel call takes, remote queries or the rank's own, the pairs
        that it attends, and their tokens if the kernel needs them."""
        rows, pairs = stage_pairs(self._plan, self._rank, stage, remote)
        if not self.scoring.needs_tokens:
            return rows, pairs, None
        row_table, key_table = self.indices(stage, remote)
        row_tokens, key_tokens = row_table.on(self.device), key_table.on(self.device)
        if self._key_positions is None:
            positions = key_tokens - (self._plan.mask.k_len - self._plan.mask.q_len)
        else:
            positions = self._key_positions[key_tokens]
        tokens = Tokens(row_tokens[slice(*rows)], key_tokens, positions, self._first_head)
        return rows, pairs, tokens

    def indices(self, stage: int, remote: bool) -> tuple[IndexTable, IndexTable]:
        """Global indices of a call's rows and keys, worked out once for all layers."""
        plan, key = self._plan, ("indices", self._rank, stage, remote)
        known: tuple[IndexTable, IndexTable] | None = plan.made.get(key)
        if known is None:
            mine = plan.rank(self._rank)
            kv = mine.stages[stage].kv
            rows = mine.q.indices if remote else plan.q_layout.positions(self._rank)
            keys = plan.k_layout.positions(self._rank) if kv is None else kv.indices
            known = plan.made[key] = IndexTable(rows), IndexTable(keys)
        return known

    def send_tables(
        self, kernel: Kernel, of_peers: Callable[[], list[IndexTable]], *, writes: bool
    ) -> None:
        """Copy index tables to the device together, for all layers and both passes: where scattered
        tokens go, here and in buffers of peers, if ranks write there, and what the kernel's calls
        read."""
        tables_of = getattr(kernel, "tables", None)
        key = ("sent", self._rank, tables_of, self.device, self.scoring.needs_tokens, writes)
        if key in self._plan.made:
            return
        mine = self._plan.rank(self._rank)
        tables = [*mine.q.tables(self._rank, writes=writes), *of_peers()]
        for n, stage in enumerate(mine.stages):
            tables += stage.kv.tables(self._rank, writes=writes) if stage.kv is not None else ()
            for remote, slices in ((False, stage.own), (True, stage.remote)):
                if len(slices):
                    _, pairs = stage_pairs(self._plan, self._rank, n, remote)
                    tables += tables_of(pairs) if tables_of is not None else ()
                    tables += self.indices(n, remote) if self.scoring.needs_tokens else ()
        send(tables, self.device)
        self._plan.made[key] = True


def concat_heads(groups: Sequence[tuple[Tensor, ...]], *dims: int) -> Sequence[Tensor]:
    """Results of groups of heads as results of all; ``dims``: which dim of each its heads are."""
    results = zip(*groups, strict=True)
    return [computed(_concat, dim, *of) for of, dim in zip(results, dims, strict=True)]


def _concat(dim: int, *parts: Tensor) -> Tensor:
    return torch.cat(parts, dim)


@lru_cache(maxsize=64)
def _dims(q_heads: int, kv_heads: int, team_size: int) -> tuple[Dims, Dims, Dims]:
    """The dims of rows, stats and keys, with their shares."""
    shares = head_shares(q_heads, kv_heads, team_size)
    of_q = tuple((share.q_start, share.q_stop) for share in shares)
    of_kv = tuple((share.kv_start, share.kv_stop) for share in shares)
    return ROWS._replace(shares=of_q), STATS._replace(shares=of_q), ROWS._replace(shares=of_kv)
