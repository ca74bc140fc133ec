"""The arithmetic on one rank's rows of the weight, a chunk of tokens at a time.

    z = cap(h Wᵀ + b)                                [chunk, v], and nothing larger is ever made
    forward     lse = log Σ exp z,  at = z[target]
    backward    dz = (g + s) p - g 1[target]         p = exp(z - lse)
                dh = dz W,  dW = Σ dzᵀ h,  db = Σ dz

g is the gradient of the loss, lse - at, and s that of lse itself. Logits, statistics and sums are
in fp32 (fp64 for fp64), whatever the inputs are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ring_attention.core.merge.merge import accumulation_dtype

# Bytes of a chunk's logits, if the user gives no chunk size. dW is read and written once per chunk:
# on an H200, with 131072 rows, half this size takes 13 % more time, and twice this size 5 % less.
CHUNK_BYTES = 1 << 29


@dataclass(frozen=True)
class Head:
    """This rank's part of the linear layer.

    Attributes:
        weight: [v, d], this rank's rows; bias: [v] or None.
        first: index of the first of them among all rows.
        softcap: logits become softcap * tanh(logits / softcap); 0 leaves them.
        chunk_size: tokens at a time; 0 chooses.
    """

    weight: Tensor
    bias: Tensor | None
    first: int
    softcap: float
    chunk_size: int

    def chunks(self, tokens: int) -> Iterator[slice]:
        """The tokens of each chunk; no chunk if there are no logits."""
        rows, wide = len(self.weight), accumulation_dtype(self.weight.dtype)
        step = self.chunk_size or max(1, CHUNK_BYTES // (max(1, rows) * wide.itemsize))
        for start in range(0, tokens if rows else 0, step):
            yield slice(start, start + step)

    def logits(self, hidden: Tensor) -> Tensor:
        """[chunk, v], in the dtype of accumulation."""
        z = product(hidden, self.weight.t())
        if self.bias is not None:
            z.add_(self.bias)
        return z.div_(self.softcap).tanh_().mul_(self.softcap) if self.softcap else z

    def columns(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """The column of each token's target in the logits, [chunk, 1], and whether this rank has
        it; the column is 0 if it does not."""
        column = (target - self.first).unsqueeze(1)
        here = (column >= 0) & (column < len(self.weight))
        return column.masked_fill(~here, 0), here


def statistics(head: Head, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """lse and the target's logit of each token over this rank's rows; -inf and 0 over no rows.

    lse is -inf if all logits are. Loss and gradients are NaN, as torch's are, only if that is so on
    all ranks.

    Args:
        hidden: [l, d]. target: int64[l].
    """
    wide = accumulation_dtype(hidden.dtype)
    lse = hidden.new_full(target.shape, -torch.inf, dtype=wide)
    at = hidden.new_zeros(target.shape, dtype=wide)
    for rows in head.chunks(len(hidden)):
        z = head.logits(hidden[rows])
        column, here = head.columns(target[rows])
        at[rows] = z.gather(1, column).masked_fill(~here, 0).squeeze(1)
        top = finite(z.amax(1, keepdim=True))
        lse[rows] = z.sub_(top).exp_().sum(1).log_().add_(top.squeeze(1))
    return lse, at


def gradients(
    head: Head,
    hidden: Tensor,
    target: Tensor,
    lse: Tensor,
    g: Tensor,
    s: Tensor,
    hidden_dtype: torch.dtype,
    wanted: Sequence[bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden (the part from this rank's rows), weight and bias.

    Args:
        lse: [l], over the rows of all ranks. g, s: [l], gradients of the loss and of lse.
        hidden_dtype: dtype of the first result; the others are in the dtype of accumulation.
        wanted: which of the three to compute; the others are None, as is the bias gradient without
            a bias.
    """
    weight = head.weight
    dtypes = (hidden_dtype, lse.dtype, lse.dtype)
    dhidden, dweight, dbias = (
        t.new_zeros(t.shape, dtype=dtype) if t is not None and want else None
        for t, dtype, want in zip((hidden, weight, head.bias), dtypes, wanted, strict=True)
    )
    scale = _scale(g, s) if weight.dtype == torch.float16 and len(hidden) else None
    if scale is not None:
        g, s = g * scale, s * scale
    lse, g, s = (t.unsqueeze(1) for t in (lse, g, s))
    for rows in head.chunks(len(hidden)):
        z = head.logits(hidden[rows])
        slope = 1 - (z / head.softcap).square_() if head.softcap else None
        column, here = head.columns(target[rows])
        dz = z.sub_(lse[rows]).exp_().mul_(g[rows] + s[rows])
        dz.scatter_(1, column, dz.gather(1, column) - g[rows].masked_fill(~here, 0))
        if slope is not None:
            dz.mul_(slope)
        if dbias is not None:
            dbias.add_(dz.sum(0))
        factor = dz.to(weight.dtype) if _mixed(weight) else dz
        if dhidden is not None:
            dh = product(factor, weight)
            dhidden[rows] = dh if scale is None else dh.div_(scale)
        if dweight is not None:
            add_product(dweight, factor.t(), hidden[rows])
    for total in (dweight, dbias):
        if total is not None and scale is not None:
            total.div_(scale)
    return dhidden, dweight, dbias


def finite(top: Tensor) -> Tensor:
    """``top``, the largest logits, with 0 for -inf: subtracted before exp it never makes the NaN of
    -inf - -inf."""
    return top.masked_fill(top == -torch.inf, 0)


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in the dtype of accumulation."""
    wide = accumulation_dtype(b.dtype)
    if _mixed(b):
        return torch.mm(a, b, out_dtype=wide)
    return a.to(wide) @ b.to(wide)


def add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """``into += a @ b``, in the dtype of accumulation."""
    if _mixed(b):
        torch.addmm(into, a, b, out_dtype=into.dtype, out=into)
    else:
        into.addmm_(a.to(into.dtype), b.to(into.dtype))


def _scale(g: Tensor, s: Tensor) -> Tensor:
    """The power of two that brings gradients of logits into the range of fp16, a scalar.

    They are rounded to the weight's dtype before they are multiplied, and fp16 has nothing below
    6e-8: for a mean over many tokens most would be 0. None exceeds ``|g| + |s|`` of its token, so
    with the largest of these between 2^14 and 2^15 none overflows. (bf16 has fp32's range.) Tokens
    whose gradient is not finite do not count. The host does not wait.
    """
    largest = (g.abs() + s.abs()).nan_to_num(0, 0).amax()
    exponent = torch.frexp(largest).exponent  # largest < 2 ** exponent
    return torch.ldexp(torch.ones_like(largest), (15 - exponent).clamp(max=126))


def _mixed(t: Tensor) -> bool:
    """Whether the device multiplies this low-precision dtype with sums in fp32. Where it does not,
    a chunk of tokens and the weight are converted first."""
    return t.is_cuda and t.dtype in (torch.bfloat16, torch.float16)
