"""The specification: attention over slices in plain torch, any dtype and device.

It takes rows in blocks, each with only the keys that the block's slices span, so that memory does
not grow with rows x keys. Internally it computes in fp32 (fp64 for fp64 inputs). On a GPU it waits
for each block's mask to be copied there. Masks are not kept for the next call, because they would
take rows x keys bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...mask.slices import K0, K1, Slices, clip, shift, to_dense
from ...merge.merge import accumulation_dtype, unattended
from ..protocol.kernel import BackwardOperands, ForwardOperands, Grads, OutLse, Pairs
from ..protocol.request import FEATURES, HALF, Capabilities
from ..protocol.scoring import Scoring, Tokens, keep

NAME = "reference"
CAPABILITIES = tuple(
    Capabilities(device, (torch.float64, torch.float32, *HALF), FEATURES)
    for device in ("cpu", "cuda")
)

# Scores of a block, all heads together: 16 MiB in fp32, of which several copies live at once.
BLOCK_SCORES = 1 << 22


@dataclass(frozen=True)
class RowBlock:
    """Some rows, the span of keys that they attend, and which pairs of the two are attended."""

    rows: slice
    keys: slice
    mask: Tensor  # bool[rows, keys]


def missing() -> str | None:
    return None


def forward(
    given: ForwardOperands, pairs: Pairs, scoring: Scoring, tokens: Tokens | None
) -> OutLse:
    q, k, v = given
    wide = accumulation_dtype(q.dtype)
    out, lse = unattended(q, v.shape[-1], wide)
    for block in _blocks(q, k, pairs.slices):
        scores, _ = _scores(block, q, k, scoring, tokens)
        block_lse = torch.logsumexp(scores, dim=-1)
        p = _probabilities(scores, block_lse)
        if scoring.dropout_p:
            p *= _dropout(block, p, scoring, tokens)
        block_out = torch.einsum("bghij,bjge->bighe", p, v[:, block.keys].to(wide))
        out[:, block.rows] = block_out.flatten(2, 3)
        lse[..., block.rows] = block_lse.flatten(1, 2)
    return out, lse


def backward(
    given: BackwardOperands, pairs: Pairs, scoring: Scoring, tokens: Tokens | None, **_: bool
) -> Grads:
    """See :class:`~.protocol.Kernel`.

    With P the probabilities under the final lse and D dropout's factors, 0 or 1 / (1 - p):
    dV = (P * D)^T dO, dS = P * (D * dO V^T - rowsum(dO * O)), dQ = scale dS K, dK = scale dS^T Q
    (Dao et al., arXiv:2205.14135, 2022, appendix B); a softcap multiplies dS by its own slope. As
    d lse / d scores = P, the gradient of lse is subtracted from rowsum(dO * O).
    """
    dout, q, k, v, out, lse, dlse = given
    wide = accumulation_dtype(q.dtype)
    dq, dk, dv = (torch.zeros_like(t, dtype=wide) for t in (q, k, v))
    grouped = (k.shape[2], -1)
    for block in _blocks(q, k, pairs.slices):
        i, j = block.rows, block.keys
        q5, dout5, out5 = (t[:, i].to(wide).unflatten(2, grouped) for t in (q, dout, out))
        k4, v4 = (t[:, j].to(wide) for t in (k, v))
        scores, slope = _scores(block, q, k, scoring, tokens)
        p = _probabilities(scores, lse[..., i].unflatten(1, grouped))
        dp = torch.einsum("bighe,bjge->bghij", dout5, v4)
        dropped = p
        if scoring.dropout_p:
            factor = _dropout(block, p, scoring, tokens)
            dropped, dp = p * factor, dp * factor
        dv[:, j] += torch.einsum("bghij,bighe->bjge", dropped, dout5)
        delta = (dout5 * out5).sum(-1).permute(0, 2, 3, 1)
        if dlse is not None:
            delta = delta - dlse[..., i].unflatten(1, grouped)
        ds = p * (dp - delta.unsqueeze(-1)) * slope * scoring.softmax_scale
        dq[:, i] = torch.einsum("bghij,bjgd->bighd", ds, k4).flatten(2, 3)
        dk[:, j] += torch.einsum("bghij,bighd->bjgd", ds, q5)
    return dq, dk, dv


def _blocks(q: Tensor, k: Tensor, slices: Slices) -> Iterator[RowBlock]:
    """Cut the rows that have keys into blocks of at most BLOCK_SCORES scores, or of one row."""
    b, rows, h, _ = q.shape
    keys = k.shape[1]
    height = max(1, BLOCK_SCORES // max(1, b * h * keys))
    for q0 in range(0, rows, height):
        q1 = min(q0 + height, rows)
        here = clip(slices, q0, q1, 0, keys)
        if len(here):
            k0, k1 = int(here[:, K0].min()), int(here[:, K1].max())
            mask = to_dense(shift(here, -q0, -k0), q1 - q0, k1 - k0)
            yield RowBlock(slice(q0, q1), slice(k0, k1), torch.from_numpy(mask).to(q.device))


def _scores(
    block: RowBlock, q: Tensor, k: Tensor, scoring: Scoring, tokens: Tokens | None
) -> tuple[Tensor, Tensor | float]:
    """Scores [b, kv heads, heads per kv head, i, j], -inf where not attended, and the slope of the
    softcap at each: 1 - (score / softcap)^2."""
    wide = accumulation_dtype(q.dtype)
    q5 = q[:, block.rows].to(wide).unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("bighd,bjgd->bghij", q5, k[:, block.keys].to(wide))
    scores *= scoring.softmax_scale
    slope: Tensor | float = 1.0
    if scoring.softcap:
        ratio = torch.tanh(scores / scoring.softcap)
        scores, slope = scoring.softcap * ratio, 1 - ratio.square()
    if scoring.alibi_slopes is not None:
        assert tokens is not None
        bias = scoring.alibi_bias(tokens.part(block.rows, block.keys), wide)
        scores += bias.unflatten(1, (k.shape[2], -1))
    return scores.masked_fill(~block.mask, -torch.inf), slope


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), 0 in rows that attend nothing."""
    safe = lse.masked_fill(lse == -torch.inf, 0.0)
    return torch.exp(scores - safe.unsqueeze(-1))


def _dropout(block: RowBlock, p: Tensor, scoring: Scoring, tokens: Tokens | None) -> Tensor:
    """What dropout multiplies the probabilities ``p`` by: 0 or 1 / (1 - dropout_p)."""
    assert tokens is not None and scoring.dropout_seed is not None
    here = tokens.part(block.rows, block.keys)
    b, g, heads_per_kv = p.shape[:3]
    drawn = scoring.dropout_seed, scoring.dropout_p, here.rows, here.keys
    kept = keep(*drawn, here.first_head, g * heads_per_kv, here.first_batch, b)
    return kept.unflatten(1, (g, heads_per_kv)).to(p.dtype) / (1 - scoring.dropout_p)
