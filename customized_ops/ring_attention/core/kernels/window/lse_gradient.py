"""The gradient of lse, through a kernel's backward that knows none."""

from __future__ import annotations

import torch
from torch import Tensor


def with_lse_gradient(
    dout: Tensor, out: Tensor, v: Tensor, dlse: Tensor | None, columns: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """dout, out and v, wider by some columns that carry ``dlse`` into the gradient of the scores.

    d lse / d scores is the probabilities, so a gradient of lse enters where rowsum(dout * out)
    does, with the opposite sign. With out = 1, dout = -dlse and v = 0 in one more column, rowsum
    gains -dlse and nothing else changes; that column of dv is nobody's gradient.

    Args:
        dout, out: [b, i, h, e]. v: [b, j, g, e]. dlse: [b, h, i], or None for no change.
        columns: how many to add; those after the first are 0.
    """
    if dlse is None:
        return dout, out, v
    column = dlse.transpose(1, 2).unsqueeze(-1).to(dout.dtype)
    rest = [] if columns == 1 else [column.new_zeros((*column.shape[:-1], columns - 1))]
    return (
        torch.cat([dout, -column, *rest], dim=-1),
        torch.cat([out, torch.ones_like(column), *rest], dim=-1),
        torch.nn.functional.pad(v, (0, columns)),
    )
