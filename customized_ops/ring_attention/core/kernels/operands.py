"""What a backward pass is given, and what both passes return."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

OutLse = tuple[Tensor, Tensor]
Grads = tuple[Tensor, Tensor, Tensor]  # dq, dk, dv


class BackwardOperands(NamedTuple):
    """The gradient of out, what the forward was given, and what it returned.

    Packed sequences have no b: see :class:`~.window.library_calls.Packing`.

    Attributes:
        dout, out: [b, i, h, e]. q: [b, i, h, d]. k: [b, j, g, d]. v: [b, j, g, e].
        lse: [b, h, i]. Like out it is final: over all keys of a row, not only over those in k.
        dlse: [b, h, i], the gradient of the final lse, in lse's dtype; None for 0.
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dlse: Tensor | None = None

    def part(self, rows: slice, keys: slice) -> BackwardOperands:
        """Some of the rows and some of the keys, as views."""
        dout, q, k, v, out, lse, dlse = self
        return BackwardOperands(
            dout[:, rows],
            q[:, rows],
            k[:, keys],
            v[:, keys],
            out[:, rows],
            lse[..., rows],
            None if dlse is None else dlse[..., rows],
        )
