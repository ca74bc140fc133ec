"""PyTorch's own context parallelism: the ring beneath ``context_parallel``.

Its public context manager patches ``scaled_dot_product_attention`` for the whole process. Here the
functions beneath it are called directly, with its own load balance (zigzag) and rotation.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .scheme import Scheme

MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"


def missing(device: torch.device) -> str | None:
    """Why it does not run here, or None."""
    if device.type != "cuda":
        return "needs a GPU"
    try:
        library = import_module(MODULE)
    except ImportError:
        return f"this torch has no {MODULE}"
    needed = ("_scaled_dot_product_ring_cudnn_attention_backward", "set_rotate_method")
    lacking = [name for name in needed if not hasattr(library, name)]
    return f"this torch's ring has no {lacking[0]}" if lacking else None


class TorchRing(Scheme):
    """Causal or full attention through cuDNN on a ring; rotate: "allgather" or "alltoall"."""

    def __init__(self, group: dist.ProcessGroup, rotate: str, *, causal: bool) -> None:
        self.library, self.rotate, self.causal = import_module(MODULE), rotate, causal
        self.mesh = DeviceMesh.from_group(group, "cuda")
        self.rest: tuple[Any, ...] = ()

    def _set(self) -> None:
        """Set the library's options, which are global and which other contestants set too."""
        self.library._cp_options.enable_load_balance = self.causal
        self.library.set_rotate_method(self.rotate)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        self._set()
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out, lse, *rest = self.library._scaled_dot_product_ring_cudnn_attention(
            self.mesh, q, k, v, is_causal=self.causal
        )
        cu_q, cu_k, most_q, most_k, seed, offset, *_ = rest
        self.rest = (None, cu_q, cu_k, most_q, most_k, 0.0, self.causal)
        return out.transpose(1, 2), (q, k, v, out, lse, seed, offset)

    def backward(self, dout: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self._set()
        grads = self.library._scaled_dot_product_ring_cudnn_attention_backward(
            self.mesh, dout.transpose(1, 2), *saved, *self.rest
        )
        dq, dk, dv = (g.transpose(1, 2) for g in grads[:3])
        return dq, dk, dv
