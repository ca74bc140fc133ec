"""The gradient of lse in a backward call of its own, for kernels that take no wider v."""

from __future__ import annotations

import torch
from torch import Tensor


def lse_apart(dlse: Tensor, out: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dout, out and v of a backward call whose dq and dk are what ``dlse`` adds to them.

    The gradient of the scores is linear in (v dout - rowsum(dout * out) + dlse); with v = 0 and, in
    the first column, out = 1 and dout = -dlse, only the last is left. dv is nobody's gradient.

    Args:
        dlse: [..., h, i]. out: [..., i, h, e]. v: [..., j, g, e].
    """
    dout, ones = torch.zeros_like(out), torch.zeros_like(out)
    dout[..., 0] = -dlse.transpose(-1, -2)
    ones[..., 0] = 1
    return dout, ones, torch.zeros_like(v)
