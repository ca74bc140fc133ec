"""A library that knows windows and nothing else, computed densely: what adapters are held to."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from customized_ops.ring_attention.core.kernels import (
    BackwardOperands,
    ForwardOperands,
    Pairs,
    Scoring,
)
from customized_ops.ring_attention.core.kernels.window.library_calls import LibraryCall, Packing
from customized_ops.ring_attention.core.kernels.window.lowering import Window
from customized_ops.ring_attention.core.mask.slices import as_slices, normalise

WIDE = 999  # wider than any sequence here: no bound
HEADS = 4

# rows, keys, slices
KINDS = {
    "full": (13, 17, [(0, 13, 0, 17, -WIDE, WIDE)]),
    "causal square": (16, 16, [(0, 16, 0, 16, -WIDE, 0)]),
    "causal, more keys": (9, 17, [(0, 9, 0, 17, -WIDE, 8)]),
    "causal, more rows": (17, 9, [(0, 17, 0, 9, -WIDE, -8)]),
    "causal, cut by keys": (17, 9, [(0, 17, 0, 9, -WIDE, 0)]),
    "diagonal not in a corner": (13, 17, [(0, 13, 0, 17, -WIDE, 2)]),
    "window": (16, 16, [(0, 16, 0, 16, -3, 2)]),
    "inverse causal": (12, 15, [(0, 12, 0, 15, 1, WIDE)]),
    "several slices share rows": (
        12,
        16,
        [(0, 12, 0, 3, -WIDE, WIDE), (2, 12, 3, 9, -WIDE, 1), (4, 8, 10, 16, 4, 6)],
    ),
    "rows out of order": (12, 12, [(6, 12, 0, 9, -WIDE, 0), (0, 6, 3, 9, -WIDE, WIDE)]),
    "one shared row": (6, 9, [(0, 4, 0, 5, -WIDE, WIDE), (3, 6, 5, 9, -WIDE, WIDE)]),
    "one key": (11, 14, [(2, 11, 5, 6, -WIDE, WIDE)]),
    "one row": (11, 14, [(4, 5, 2, 13, -WIDE, WIDE)]),
    "one diagonal": (11, 14, [(0, 11, 0, 14, 2, 2)]),
    "uncovered rows": (14, 14, [(3, 7, 0, 6, -WIDE, 0), (10, 12, 8, 14, -WIDE, WIDE)]),
    "documents": (15, 15, [(a, b, a, b, -WIDE, 0) for a, b in [(0, 6), (6, 7), (7, 15)]]),
    "documents, gaps": (15, 16, [(1, 5, 2, 6, -WIDE, 1), (5, 9, 9, 13, -WIDE, 4)]),
    "documents, rows left out": (15, 15, [(0, 4, 0, 4, -WIDE, 0), (7, 15, 4, 12, -WIDE, -3)]),
    "documents of one row, gaps in keys": (
        5,
        19,
        [(n, n + 1, 4 * n, 4 * n + 2, -WIDE, WIDE) for n in range(5)],
    ),
    "full beside causal": (12, 12, [(0, 5, 0, 5, -WIDE, 0), (5, 12, 5, 12, -WIDE, WIDE)]),
    "streaming": (16, 16, [(0, 16, 0, 16, -3, 0), (4, 16, 0, 2, -WIDE, -4)]),
    "band, few keys": (20, 4, [(0, 20, 0, 4, -12, -3)]),
    "inverse causal, few keys": (20, 4, [(0, 20, 0, 4, -15, WIDE)]),
    "full, few keys, beside a window": (
        25,
        7,
        [(0, 20, 0, 2, -WIDE, WIDE), (20, 25, 2, 7, -20, WIDE)],
    ),
    "no slices": (7, 9, []),
}


def pairs_of(slices: list[tuple[int, ...]], rows: int, keys: int) -> Pairs:
    return Pairs(normalise(as_slices(slices)), rows, keys)


def draw(
    batch: int,
    rows: int,
    keys: int,
    kv_heads: int = 2,
    d: int = 6,
    e: int = 5,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """q, k, v, dout, dlse."""
    source = torch.Generator().manual_seed(rows * 100 + keys)
    shapes = [(batch, rows, HEADS, d), (batch, keys, kv_heads, d), (batch, keys, kv_heads, e)]
    shapes += [(batch, rows, HEADS, e), (batch, HEADS, rows)]
    return [torch.randn(s, dtype=torch.float64, generator=source).to(dtype) for s in shapes]


def window_mask(rows: int, keys: int, window: Window) -> Tensor:
    """bool[rows, keys], True where a window aligned to the bottom right corner attends."""
    left, right = window
    beyond = torch.arange(keys) - torch.arange(rows).unsqueeze(1) - (keys - rows)
    allowed = torch.ones(rows, keys, dtype=torch.bool)
    if left >= 0:
        allowed &= beyond >= -left
    if right >= 0:
        allowed &= beyond <= right
    return allowed


def dense_mask(rows: int, keys: int, window: Window, packing: Packing | None) -> Tensor:
    """That of one sequence, or of packed ones in their places."""
    if packing is None:
        return window_mask(rows, keys, window)
    allowed = torch.zeros(rows, keys, dtype=torch.bool)
    ends = zip(packing.cu_seqlens_q.tolist(), packing.cu_seqlens_k.tolist(), strict=True)
    q0, k0 = next(ends)
    for q1, k1 in ends:
        assert q1 - q0 <= packing.max_seqlen_q and k1 - k0 <= packing.max_seqlen_k
        allowed[q0:q1, k0:k1] = window_mask(q1 - q0, k1 - k0, window)
        q0, k0 = q1, k1
    assert (q0, k0) == (rows, keys), "tokens at the end are in no sequence"
    return allowed


@dataclass
class Library:
    """``forward`` and ``backward`` are an ``Attend`` and an ``AttendBackward``; ``calls`` holds
    (window, sequences, q's shape) of each call, 0 sequences for one that is not packed. It
    ``writes`` results where they belong, or leaves that to the caller."""

    writes: bool = True
    calls: list[tuple[Window, int, tuple[int, ...]]] = field(default_factory=list)

    def forward(
        self,
        given: ForwardOperands,
        call: LibraryCall,
        scoring: Scoring,
        *,
        into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Rows without keys give lse +inf, as FlashAttention-2 does."""
        mask = self._mask_of(given.q, given.k, call)
        if call.packing is None:
            out, lse = attended(*given, mask, scoring)
        else:
            out, lse = (t[0] for t in attended(*(t[None] for t in given), mask, scoring))
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        if into is None or not self.writes:
            return out, lse
        return into[0].copy_(out), into[1].copy_(lse)

    def backward(
        self,
        given: BackwardOperands,
        call: LibraryCall,
        scoring: Scoring,
        *,
        deterministic: bool,
        into: tuple[Tensor | None, ...] = (None, None, None),
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the arguments of :meth:`forward`."""
        mask = self._mask_of(given.q, given.k, call)
        if call.packing is None:
            results = gradients(given, mask, scoring)
        else:
            batched = BackwardOperands(*(t if t is None else t[None] for t in given))
            results = tuple(t[0] for t in gradients(batched, mask, scoring))
        dq, dk, dv = (
            result if place is None or not self.writes else place.copy_(result)
            for result, place in zip(results, into, strict=True)
        )
        return dq, dk, dv

    def _mask_of(self, q: Tensor, k: Tensor, call: LibraryCall) -> Tensor:
        """The mask of a call, which is noted."""
        sequences = 0 if call.packing is None else len(call.packing.cu_seqlens_q) - 1
        self.calls.append((call.window, sequences, tuple(q.shape)))
        return dense_mask(q.shape[-3], k.shape[-3], call.window, call.packing)


def attended(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """out [b, i, h, e] in q's dtype and lse [b, h, i] in fp32 or fp64. ``mask``: [i, j], or of each
    entry and head."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores, _ = _scores(q.to(wide), k.to(wide), mask, scoring)
    lse = torch.logsumexp(scores, dim=-1)
    p = _probabilities(scores, lse)
    return torch.einsum("bhij,bjhe->bihe", p, _repeated(v, q).to(wide)).to(q.dtype), lse


def gradients(
    given: BackwardOperands, mask: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in q's dtype, of a part of the keys or of all: out and lse are final."""
    wide = torch.promote_types(given.q.dtype, given.lse.dtype)
    dout, q, k, v, out = (t.to(wide) for t in given[:5])
    scores, slope = _scores(q, k, mask, scoring)
    p = _probabilities(scores, given.lse)
    delta = (dout * out).sum(-1).transpose(1, 2)
    if given.dlse is not None:
        delta = delta - given.dlse
    dp = torch.einsum("bihe,bjhe->bhij", dout, _repeated(v, q))
    ds = p * (dp - delta.unsqueeze(-1)) * slope * scoring.softmax_scale
    groups = (k.shape[2], -1)
    dq = torch.einsum("bhij,bjhd->bihd", ds, _repeated(k, q))
    dk = torch.einsum("bhij,bihd->bjhd", ds, q).unflatten(2, groups).sum(3)
    dv = torch.einsum("bhij,bihe->bjhe", p, dout).unflatten(2, groups).sum(3)
    return dq.to(given.q.dtype), dk.to(given.q.dtype), dv.to(given.q.dtype)


def _repeated(t: Tensor, q: Tensor) -> Tensor:
    return t.repeat_interleave(q.shape[2] // t.shape[2], dim=2)


def _scores(q: Tensor, k: Tensor, mask: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Scores, -inf where not attended, and the slope of the softcap."""
    scores = torch.einsum("bihd,bjhd->bhij", q, _repeated(k, q)) * scoring.softmax_scale
    slope = torch.ones_like(scores)
    if scoring.softcap:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        slope = 1 - (scores / scoring.softcap).square()
    return scores.masked_fill(~mask, -torch.inf), slope


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    return torch.exp(scores - lse.masked_fill(lse.isinf(), 0.0).unsqueeze(-1))
