"""Operands for kernels that want q, k and v equally wide, or know no gradient of lse."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..protocol import Capabilities, Request
from .lse_gradient import with_lse_gradient

LSE_COLUMNS = 8  # what the gradient of lse adds to v: head dims are multiples of this


@dataclass(frozen=True)
class WideningCapabilities(Capabilities):
    """Of a kernel that is given the gradient of lse by :func:`widened_by_lse`: its columns count
    where there is one."""

    def refuses(self, request: Request) -> str | None:
        """See :class:`~.protocol.Capabilities`."""
        reason = super().refuses(request)
        most = max((e for _, e in self.widths), default=request.v_dim) - LSE_COLUMNS
        if reason is None and "lse gradient" in request.features and request.v_dim > most:
            return f"takes a head dim of v up to {most} with lse gradient, not {request.v_dim}"
        return reason


def same_width(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Zero-pad the last dims to one width: zeros change neither scores nor the columns that are
    kept. Those that need no padding are returned as they are."""
    width = max(t.shape[-1] for t in tensors)
    return tuple(
        t if t.shape[-1] == width else torch.nn.functional.pad(t, (0, width - t.shape[-1]))
        for t in tensors
    )


def widened_by_lse(
    dout: Tensor, out: Tensor, v: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`~.lse_gradient.with_lse_gradient`, of packed operands too.

    Args:
        dout, out: [b, i, h, e], v: [b, j, g, e], dlse: [b, h, i]; or all without b.
    """
    if dlse is None or dlse.ndim == 3:
        return with_lse_gradient(dout, out, v, dlse, columns=LSE_COLUMNS)
    dout, out, v, dlse = (t.unsqueeze(0) for t in (dout, out, v, dlse))
    dout, out, v = with_lse_gradient(dout, out, v, dlse, columns=LSE_COLUMNS)
    return dout.squeeze(0), out.squeeze(0), v.squeeze(0)


def cut_to(grads: tuple[Tensor, ...], likes: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Each without the columns that its own tensor does not have, a view; itself if it has all."""
    return tuple(
        g if g.shape[-1] == t.shape[-1] else g[..., : t.shape[-1]]
        for g, t in zip(grads, likes, strict=True)
    )
