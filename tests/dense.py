"""The specification that tests compare with: attention over a dense mask, in plain torch.

Nothing of the package's kernels is used, so that an error there cannot hide here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from customized_ops.ring_attention.core.mask import AttnMask


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AttnMask | Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of all pairs at once, in the dtype of the inputs; differentiable.

    Args:
        q: [b, l, h, d], k: [b, m, g, d], v: [b, m, g, e]; h is a multiple of g.
        mask: an AttnMask, or bool[l, m], True where a pair is attended.
    Returns:
        out [b, l, h, e] and lse [b, h, l]. A row with no key gives 0 and -inf, its gradients are 0.
    """
    allowed = mask if isinstance(mask, Tensor) else torch.from_numpy(mask.to_dense())
    unattended = ~allowed.any(dim=-1)
    heads_per_kv = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(heads_per_kv, dim=2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * softmax_scale
    # Rows with no key keep their scores, so that no step divides by zero; they are blanked after.
    scores = scores.masked_fill(~(allowed | unattended.unsqueeze(-1)), -torch.inf)
    weights = torch.softmax(scores, dim=-1) * allowed
    lse = torch.logsumexp(scores, dim=-1).masked_fill(unattended, -torch.inf)
    return torch.einsum("bhij,bjhe->bihe", weights, v), lse


def dense_gradients(
    q: Tensor, k: Tensor, v: Tensor, mask: AttnMask | Tensor, softmax_scale: float, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, dq, dk, dv) of :func:`dense_attention` for the output gradient ``dout``."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = dense_attention(*leaves, mask, softmax_scale)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    return out.detach(), lse.detach(), dq, dk, dv


def assert_same(name: str, got: Tensor, want: Tensor, tolerance: float = 1e-10) -> None:
    """Same shape, no NaN, infinities in the same places, the rest equal within ``tolerance``."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
    got, want = got.detach().double(), want.detach().double()
    assert not want.isnan().any(), f"{name}: the expected value has NaN"
    assert not got.isnan().any(), f"{name}: {int(got.isnan().sum())} of {got.numel()} are NaN"
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite), f"{name}: infinities differ"
    assert torch.equal(got[~finite], want[~finite]), f"{name}: infinities differ in sign"
    error = worst(got[finite], want[finite])
    assert error <= tolerance, f"{name}: error {error:.3e} > {tolerance:.3e}"


def worst(got: Tensor, want: Tensor) -> float:
    """Largest absolute difference, 0 of nothing; NaN where either has one."""
    difference = (got.double() - want.double()).abs()
    return difference.max().item() if difference.numel() else 0.0
