"""A kernel as CONTRIBUTING's recipe says to write one: its library knows windows and cu_seqlens.

The library is a stand-in, see ``windows.Library``; the rest is what a file of ``core/kernels`` has.
"""

from __future__ import annotations

import torch
from windows import Library

from customized_ops.ring_attention.core.kernels import Capabilities
from customized_ops.ring_attention.core.kernels.window.windowed import kernel_of

NAME = "mine"
CAPABILITIES = (
    Capabilities(
        "cpu",
        (torch.float64, torch.float32, torch.bfloat16, torch.float16),
        ("window", "lse gradient", "deterministic"),
    ),
)
LIBRARY = Library()


def missing() -> str | None:
    """Nothing: the stand-in is always there."""
    return None


forward, backward, tables = kernel_of(LIBRARY.forward, LIBRARY.backward)
