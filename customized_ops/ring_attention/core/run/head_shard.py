"""A rank's share of the heads, groups of them, and which tokens it works on."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ..comm.transfer_side import ROWS, STATS, Dims
from ..kernels import Pairs, Scoring, Tokens
from ..merge.merge import Sum, unattended
from ..plan import Plan
from ..plan.head_shares import head_shares
from ..plan.rank_plan import Range


class HeadShard:
    """What one rank computes of a call: the n-th of a team has the n-th share of the heads.

    Attributes:
        whole: whether the share is all heads.
        rows, stats, keys: dims, with the shares, of what is shaped as q, as lse, and as k or v.
        scoring: that of these heads.
        device: of the call's tensors.
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
            scoring = self._scoring_of_heads(scoring)
        self.scoring = scoring

    def _scoring_of_heads(self, scoring: Scoring) -> Scoring:
        if scoring.alibi_slopes is None:
            return scoring
        return replace(scoring, alibi_slopes=self.of(scoring.alibi_slopes, self.stats))  # [b, h]

    def groups(self, q: Tensor, k: Tensor) -> list[HeadShard]:
        """The groups of heads whose keys arrive one after the other, each as if it were a share
        that every rank has; this share itself where there is one group.

        Args:
            q: [b, l, h, d], k: [b, m, g, d]: with all heads.
        """
        q_heads, kv_heads = q.shape[ROWS.heads], k.shape[ROWS.heads]
        count = min(self._plan.head_groups, kv_heads)
        if count == 1:
            return [self]
        assert self.whole, "heads are split between ranks or in groups, not both"
        groups = []
        dims = _dims(q_heads, kv_heads, count)
        for n in range(count):
            group = copy(self)
            group.whole = False
            group.rows, group.stats, group.keys = (
                dim._replace(shares=dim.shares[n : n + 1]) for dim in dims
            )
            ((group._first_head, _),) = group.rows.shares
            group.scoring = group._scoring_of_heads(self.scoring)
            groups.append(group)
        return groups

    def of(self, tensor: Tensor, dims: Dims) -> Tensor:
        """The share of ``tensor``, a view."""
        return dims.share(tensor, self._rank)

    def of_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The share of keys and values, views."""
        return self.of(k, self.keys), self.of(v, self.keys)

    def among_all(self, out: Tensor, lse: Tensor, q: Tensor, v_dim: int) -> tuple[Tensor, Tensor]:
        """A share's results in tensors of all heads, the rest as if it attended nothing."""
        all_out, all_lse = unattended(q, v_dim, out.dtype)
        self.of(all_out, self.rows).copy_(out)
        self.of(all_lse, self.stats).copy_(lse)
        return all_out, all_lse

    def add(self, total: Sum, part: Tensor, dims: Dims, rows: slice | None = None) -> None:
        """Add a part of these heads, and of a range of tokens, to a sum over all heads; takes
        ownership of the part."""
        if self.whole:
            total.add(part, rows)
        else:
            here = total.wide() if rows is None else total.wide()[:, rows]
            self.of(here, dims).add_(part)

    def call(
        self, stage: int, *, guests: bool, q: Tensor, keys: Tensor
    ) -> tuple[Range, Pairs, Tokens | None]:
        """Which rows a stage's kernel call is given, which pairs it attends, and which tokens they
        are, if the kernel must know.

        Args:
            guests: whether the rows are those received from others, not the rank's own.
            q: all of those rows. keys: those of the stage.
        """
        key = ("call", self._rank, stage, guests)
        known = self._plan.on_device.get(key)
        if known is None:
            here = self._plan.rank(self._rank).stages[stage]
            rows = start, stop = here.guest_hull if guests else here.own_hull
            slices = here.guest_in_hull if guests else here.own_in_hull
            known = rows, Pairs(slices, stop - start, keys.shape[1])
            self._plan.on_device[key] = known
        rows, pairs = known
        if not self.scoring.needs_tokens:
            return rows, pairs, None
        return rows, pairs, self._tokens(stage, guests).part(slice(*rows), slice(None))

    def _tokens(self, stage: int, guests: bool) -> Tokens:
        rows, keys = self._indices(stage, guests)
        mask = self._plan.mask
        positions = (
            keys - (mask.k_len - mask.q_len)
            if self._key_positions is None
            else self._key_positions[keys]
        )
        return Tokens(rows, keys, positions, self._first_head)

    def _indices(self, stage: int, guests: bool) -> tuple[Tensor, Tensor]:
        """Global indices of the rows and the keys at hand, on the device once for all layers."""
        plan, key = self._plan, (self._rank, stage, guests, self.device)
        if key not in plan.on_device:
            mine = plan.rank(self._rank)
            kv = mine.stages[stage].kv
            rows = mine.q.indices if guests else plan.q_layout.positions(self._rank)
            keys = plan.k_layout.positions(self._rank) if kv is None else kv.indices
            pair = (torch.from_numpy(x).to(self.device) for x in (rows, keys))
            plan.on_device[key] = tuple(pair)
        return plan.on_device[key]


class Parts:
    """Results of groups of heads, in order, to be set side by side."""

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, ...]] = []

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, *results: Tensor) -> None:
        """Those of the next group."""
        self._parts.append(results)

    def joined(self, *heads: int) -> Sequence[Tensor]:
        """Each result with the heads of all groups; ``heads`` are the dims that they are. Of one
        group they are as they came."""
        if len(self._parts) == 1:
            return self._parts[0]
        results = zip(*self._parts, strict=True)
        return [torch.cat(of, dim) for of, dim in zip(results, heads, strict=True)]


@lru_cache(maxsize=64)
def _dims(q_heads: int, kv_heads: int, team_size: int) -> tuple[Dims, Dims, Dims]:
    """Of rows, stats and keys."""
    shares = head_shares(q_heads, kv_heads, team_size)
    of_q = tuple((share.q_start, share.q_stop) for share in shares)
    of_kv = tuple((share.kv_start, share.kv_stop) for share in shares)
    return ROWS._replace(shares=of_q), STATS._replace(shares=of_q), ROWS._replace(shares=of_kv)
