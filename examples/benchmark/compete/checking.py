"""Whether a contestant computes what it should, before it is timed.

Two comparisons, each over all ranks, of out, dq, dk and dv:

- against attention in fp32 of a sample of rows over all their keys, with dout zero elsewhere, so
  that gradients of k and v are known at any length;
- against the single GPU's result of the whole problem, where that was computed.

An error is the norm of the difference over the norm of the correct result. In addition, no row may
differ by a large part of its norm, which a norm over all rows would not show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from benchmark.cases import Case
from benchmark.contestant import Attention
from benchmark.ranks import Ranks
from customized_ops.ring_attention import Layout

NAMES = ("out", "dq", "dk", "dv")
WORST_ROW = 0.25
SAMPLE = 96  # rows, about


def tolerance(dtype: torch.dtype) -> float:
    """Largest relative error that is not taken for a mistake."""
    return 2e-2 if dtype.itemsize < 4 else 1e-4


def is_fine(errors: Sequence[float], dtype: torch.dtype) -> bool:
    """Whether a relative error and a worst row are no mistake."""
    return errors[0] < tolerance(dtype) and errors[1] < WORST_ROW


def both_passes(
    attention: Attention, shards: Sequence[Tensor], ranks: Ranks | None = None
) -> tuple[Tensor, ...]:
    """out, dq, dk and dv.

    Args:
        ranks: if given, they wait for each other between the passes, so that a failure on one rank
            in the forward does not leave another waiting in the backward.
    """
    *leaves, dout = shards
    out = attention(*leaves)
    if ranks is not None:
        ranks.wait()
        ranks.gather("forward")
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))


@dataclass(frozen=True)
class Sample:
    """Rows of a case and the correct results for them.

    Attributes:
        rows: global indices, sorted. dout: [1, l, h, d], zero but in these rows.
        right: out and dq [1, rows, h, d], dk and dv [1, l, g, d], fp32.
    """

    rows: Tensor
    dout: Tensor
    right: tuple[Tensor, ...]

    @classmethod
    def of(cls, case: Case, whole: Sequence[Tensor], ranks: int) -> Sample:
        """Rows around the edges of what ranks hold, and others spread over the sequence."""
        n, draw = case.tokens, np.random.default_rng(0)
        edges = np.arange(2 * ranks + 1) * n // (2 * ranks)
        near = (edges[:, None] + np.arange(-2, 2)).ravel()
        picked = np.concatenate([near, draw.integers(0, n, SAMPLE - min(SAMPLE, len(near)))])
        index = np.unique(np.clip(picked, 0, n - 1))
        q, k, v, dout = whole
        rows = torch.from_numpy(index).to(q.device)
        sparse = torch.zeros_like(dout)
        sparse[:, rows] = dout[:, rows]
        seen = torch.from_numpy(_seen(case, index)).to(q.device)
        return cls(rows, sparse, _attention(q[0, rows], k[0], v[0], dout[0, rows], seen))

    def errors(
        self,
        ranks: Ranks,
        attention: Attention,
        shards: Sequence[Tensor],
        layout: Layout,
        rank: int,
    ) -> list[float]:
        """Largest relative error and worst row of a contestant, over all ranks.

        Args:
            rank: this rank in ``layout``.
        """
        dout = layout.shard(self.dout, rank).contiguous()
        out, dq, dk, dv = both_passes(attention, (*shards[:3], dout), ranks)
        place = torch.full((layout.total,), -1, dtype=torch.int64)
        place[torch.from_numpy(layout.positions(rank))] = torch.arange(layout.sizes[rank])
        held = place[self.rows.cpu()]
        mine, here = held[held >= 0].to(out.device), (held >= 0).to(out.device)
        right_keys = (layout.shard(t, rank) for t in self.right[2:])
        right = (*(t[:, here] for t in self.right[:2]), *right_keys)
        return largest(ranks, (out[:, mine], dq[:, mine], dk, dv), right)


def _seen(case: Case, rows: np.ndarray) -> np.ndarray:
    """Whether each row sees each key."""
    seen, keys = np.zeros((len(rows), case.tokens), dtype=bool), np.arange(case.tokens)
    for q0, q1, k0, k1, lo, hi in case.mask.slices.tolist():
        for n in range(*np.searchsorted(rows, [q0, q1])):
            first, last = max(k0, rows[n] + lo), min(k1 - 1, rows[n] + hi)
            seen[n] |= (keys >= first) & (keys <= last)
    return seen


def _attention(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, seen: Tensor) -> tuple[Tensor, ...]:
    """out, dq, dk and dv in fp32 of a few rows q over all keys, one key head at a time."""
    rows, h, d = q.shape
    ratio, hidden = h // k.shape[1], ~seen
    out, dq = (q.new_zeros((1, rows, h, d), dtype=torch.float32) for _ in range(2))
    dk, dv = (torch.zeros_like(t[None], dtype=torch.float32) for t in (k, v))
    for g in range(k.shape[1]):
        keys, values = k[:, g].float(), v[:, g].float()
        for n in range(g * ratio, (g + 1) * ratio):
            own, given = q[:, n].float(), dout[:, n].float()
            scores = (own @ keys.t() * d**-0.5).masked_fill_(hidden, -torch.inf)
            p = scores.softmax(-1).nan_to_num_(0.0)  # for rows that see nothing
            out[0, :, n] = p @ values
            dv[0, :, g] += p.t() @ given
            ds = p * (given @ values.t() - (given * out[0, :, n]).sum(-1, keepdim=True)) * d**-0.5
            dq[0, :, n] = ds @ keys
            dk[0, :, g] += ds.t() @ own
    return out, dq, dk, dv


def largest(ranks: Ranks, given: Sequence[Tensor], right: Sequence[Tensor]) -> list[float]:
    """[relative error, worst row] of the worst tensor, over all ranks; NaN counts as infinite."""
    told = ranks.gather([_sums(a, b) for a, b in zip(given, right, strict=True)])
    worst = [0.0, 0.0]
    for each in zip(*told, strict=True):
        off, norm, rows = (sum(rank[n] for rank in each) for n in range(3))
        usual = sqrt(norm / max(rows, 1))
        row = max((_finite(r[3] / max(r[4], usual, 1e-30)) for r in each if r[2]), default=0.0)
        worst = [max(worst[0], _finite(sqrt(off / max(norm, 1e-30)))), max(worst[1], row)]
    return worst


def _finite(error: float) -> float:
    """NaN as infinity, which compares as larger than any number."""
    return error if error == error else float("inf")


def _sums(given: Tensor, right: Tensor) -> list[float]:
    """Sums of squares of the difference and of the correct result, the number of rows, and for the
    row that differs most relative to its norm, the norms of its difference and of itself."""
    if given.numel() == 0:
        return [0.0] * 5
    total, rows = torch.zeros(2, dtype=torch.float64, device=given.device), given.shape[1]
    off, norm = [], []
    for a, b in zip(given.split(8192, 1), right.split(8192, 1), strict=True):
        b = b.float()
        off.append((a.float() - b).flatten(2).norm(dim=-1).flatten())
        norm.append(b.flatten(2).norm(dim=-1).flatten())
    off_row, row = torch.cat(off), torch.cat(norm)
    total[0], total[1] = off_row.double().square().sum(), row.double().square().sum()
    usual = row.square().mean().sqrt()
    at = (off_row / torch.maximum(row, usual).clamp_min(1e-30)).nan_to_num(torch.inf).argmax()
    return [*total.tolist(), rows, off_row[at].item(), row[at].item()]
