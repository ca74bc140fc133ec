"""The specification: attention over slices in plain torch, any dtype and device.

All pairs at once: memory is rows x keys per head, so it is for tests and for small or unusual
requests. Internally it computes in fp32 (fp64 for fp64 inputs).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..merge import accumulation_dtype
from ..slices import Slices, to_dense
from .protocol import Capabilities

CAPABILITIES = Capabilities(
    name="reference",
    devices=("cpu", "cuda"),
    dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16),
)


def forward(
    q: Tensor, k: Tensor, v: Tensor, slices: Slices, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """See :class:`~.protocol.Kernel`."""
    scores = _scores(q, k, slices, softmax_scale)
    lse = torch.logsumexp(scores, dim=-1)
    p = _probabilities(scores, lse)
    out = torch.einsum("bghij,bjgd->bighd", p, v.to(p.dtype))
    return out.flatten(2, 3), lse.flatten(1, 2)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    slices: Slices,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :class:`~.protocol.Kernel`.

    With P the probabilities under the final lse: dV = P^T dO, dS = P * (dO V^T - rowsum(dO * O)),
    dQ = scale dS K, dK = scale dS^T Q (Dao et al., arXiv:2205.14135, 2022, equations 3 to 6).
    """
    scores = _scores(q, k, slices, softmax_scale)
    p = _probabilities(scores, lse.unflatten(1, (k.shape[2], -1)))
    grouped = (k.shape[2], q.shape[2] // k.shape[2])
    q5, dout5, out5 = (t.to(p.dtype).unflatten(2, grouped) for t in (q, dout, out))
    k4, v4 = k.to(p.dtype), v.to(p.dtype)
    dv = torch.einsum("bghij,bighd->bjgd", p, dout5)
    dp = torch.einsum("bighd,bjgd->bghij", dout5, v4)
    delta = (dout5 * out5).sum(-1).permute(0, 2, 3, 1).unsqueeze(-1)
    ds = p * (dp - delta) * softmax_scale
    dq = torch.einsum("bghij,bjgd->bighd", ds, k4).flatten(2, 3)
    dk = torch.einsum("bghij,bighd->bjgd", ds, q5)
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor, slices: Slices, softmax_scale: float) -> Tensor:
    """[b, kv heads, heads per kv head, i, j], -inf where not attended."""
    dtype = accumulation_dtype(q.dtype)
    q5 = q.to(dtype).unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("bighd,bjgd->bghij", q5, k.to(dtype)) * softmax_scale
    mask = torch.from_numpy(to_dense(slices, q.shape[1], k.shape[1])).to(q.device)
    return scores.masked_fill(~mask, -torch.inf)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), 0 in rows that attend nothing."""
    safe = lse.masked_fill(lse == -torch.inf, 0.0)
    return torch.exp(scores - safe.unsqueeze(-1))
