"""Operands for libraries that want q, k and v equally wide."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.nn.functional import pad

from ..operands import BackwardOperands, Grads


def same_width(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Zero-pad the last dims to one width: zeros change neither scores nor the columns that are
    kept. A tensor that needs no padding is returned as it is."""
    width = max(t.shape[-1] for t in tensors)
    return tuple(t if t.shape[-1] == width else pad(t, (0, width - t.shape[-1])) for t in tensors)


def operands_of_same_width(given: BackwardOperands) -> BackwardOperands:
    """:func:`same_width` of all operands of a backward."""
    dout, q, k, v, out = same_width(*given[:5])
    return BackwardOperands(dout, q, k, v, out, given.lse, given.dlse)


def cut_to(grads: Iterable[Tensor], given: BackwardOperands) -> Grads:
    """dq, dk, dv without the columns that q, k and v do not have: views, or what was given."""
    dq, dk, dv = (
        grad if grad.shape[-1] == t.shape[-1] else grad[..., : t.shape[-1]]
        for grad, t in zip(grads, (given.q, given.k, given.v), strict=True)
    )
    return dq, dk, dv
