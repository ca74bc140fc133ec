"""A rank's share of the heads, and which tokens it works on."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .comm import ROWS, STATS, Dims
from .kernels import Pairs, Scoring, Tokens
from .merge import Sum, unattended
from .plan import Plan


class Share:
    """What one rank computes of a call: the n-th of a team has the n-th share of the heads.

    Attributes:
        whole: whether the share is all heads.
        scoring: that of these heads.
        device: of the call's tensors.
    """

    def __init__(
        self, plan: Plan, rank: int, q: Tensor, scoring: Scoring, key_positions: Tensor | None
    ) -> None:
        self._plan, self._rank, self.device = plan, rank, q.device
        self._key_positions = key_positions
        self._n, self._count = rank % plan.team_size, plan.team_size
        self._first_head = self._n * (q.shape[ROWS.heads] // self._count)
        self.whole = self._count == 1
        if scoring.alibi_slopes is not None and not self.whole:
            slopes = self.of(scoring.alibi_slopes, Dims(tokens=-1, heads=1))
            scoring = replace(scoring, alibi_slopes=slopes)
        self.scoring = scoring

    def of(self, tensor: Tensor, dims: Dims = ROWS) -> Tensor:
        """The share of ``tensor``, a view."""
        if self.whole:
            return tensor
        heads = tensor.shape[dims.heads] // self._count
        return tensor.narrow(dims.heads, self._n * heads, heads)

    def among_all(self, out: Tensor, lse: Tensor, q: Tensor, v_dim: int) -> tuple[Tensor, Tensor]:
        """A share's results in tensors of all heads, the rest as if it attended nothing."""
        all_out, all_lse = unattended(q, v_dim, out.dtype)
        self.of(all_out).copy_(out)
        self.of(all_lse, STATS).copy_(lse)
        return all_out, all_lse

    def add(self, total: Sum, part: Tensor, rows: slice | None = None) -> None:
        """Add a part of these heads, and of a range of tokens, to a sum over all heads; takes
        ownership of the part."""
        if self.whole:
            total.add(part, rows)
        else:
            here = total.wide() if rows is None else total.wide()[:, rows]
            self.of(here).add_(part)

    def call(
        self, stage: int, *, guests: bool, q: Tensor, keys: Tensor
    ) -> tuple[slice, Pairs, Tokens | None]:
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
            start, stop = here.guest_hull if guests else here.own_hull
            slices = here.guest_in_hull if guests else here.own_in_hull
            known = slice(start, stop), Pairs(slices, stop - start, keys.shape[1])
            self._plan.on_device[key] = known
        rows, pairs = known
        if not self.scoring.needs_tokens:
            return rows, pairs, None
        return rows, pairs, self._tokens(stage, guests).part(rows, slice(None))

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
