"""The arithmetic on one rank's rows of the weight, a chunk of tokens at a time.

    z = cap(h Wᵀ + b)                                [chunk, v], and nothing larger is ever made
    forward     lse = log Σ exp z,  at = z[target]
    backward    dz = (g + s) p - g 1[target]         p = exp(z - lse)
                dh = dz W,  dW = Σ dzᵀ h,  db = Σ dz

g is the gradient of the loss, lse - at, and s that of lse itself. Logits, statistics and sums are
in fp32 (fp64 for fp64), whatever the inputs are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ring_attention.core.merge import accumulation_dtype

# Of a chunk's logits, where the user names no chunk size. dW is read and written once a chunk: on
# an H200, with 131072 rows, half as much takes 13 % more time, twice as much 5 % less.
CHUNK_BYTES = 1 << 29


@dataclass(frozen=True)
class Head:
    """This rank's part of the linear layer.

    Attributes:
        weight: [v, d], this rank's rows; bias: [v] or None.
        first: the first of them among all rows.
        softcap: logits become softcap * tanh(logits / softcap); 0 leaves them.
        chunk_size: tokens at a time; 0 chooses.
    """

    weight: Tensor
    bias: Tensor | None
    first: int
    softcap: float
    chunk_size: int

    def chunks(self, tokens: int) -> Iterator[slice]:
        """Rows of the tokens to work on at a time; none where there are no logits."""
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
        """Where each token's target is in its row of logits, [chunk, 1], and whether it is there;
        0 where it is not."""
        column = (target - self.first).unsqueeze(1)
        here = (column >= 0) & (column < len(self.weight))
        return column.masked_fill(~here, 0), here


def statistics(head: Head, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """lse and the target's logit of each token, over this rank's rows: -inf and 0 of none.

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
        top = z.amax(1, keepdim=True)
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
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of hidden (what comes from this rank's rows), weight and bias.

    Args:
        lse: [l], over the rows of all ranks. g, s: [l], gradients of the loss and of lse.
        hidden_dtype: of the first result; the others are in the dtype of accumulation.
    """
    weight = head.weight
    dhidden = hidden.new_zeros(hidden.shape, dtype=hidden_dtype)
    dweight = weight.new_zeros(weight.shape, dtype=lse.dtype)
    dbias = None if head.bias is None else weight.new_zeros(len(weight), dtype=lse.dtype)
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
        dhidden[rows] = product(factor, weight)
        add_product(dweight, factor.t(), hidden[rows])
    return dhidden, dweight, dbias


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


def _mixed(t: Tensor) -> bool:
    """Whether the device multiplies this low precision with sums in fp32; elsewhere it is
    converted, a chunk of tokens and the weight at a time."""
    return t.is_cuda and t.dtype in (torch.bfloat16, torch.float16)
