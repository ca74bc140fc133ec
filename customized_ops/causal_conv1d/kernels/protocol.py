"""What a kernel of the convolution is: it runs along a rank's buffer on one device.

y_t = act(bias + Σ_j weight_j x_{t - width + 1 + j})        tokens before the document are 0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...along_sequence.kernel_choice import Candidate
from ..halo import Halo

ACTIVATIONS = ("", "silu", "swish")  # the last two are one function


@dataclass(frozen=True)
class Filter:
    """What the tokens are convolved with.

    Attributes:
        weight: [d, width]. bias: [d] or None. activation: one of :data:`ACTIVATIONS`.
    """

    weight: Tensor
    bias: Tensor | None
    activation: str


class Request(NamedTuple):
    """A call that a kernel accepts or refuses by its shapes, dtypes and device.

    Attributes:
        x: [b, l, d]. weight: [d, width].
    """

    x: Tensor
    weight: Tensor


class Kernel(Candidate, Protocol):
    """The convolution on one device; a :class:`Request` is what it accepts or refuses."""

    def convolve(self, x: Tensor, filter_: Filter, halo: Halo) -> Tensor:
        """[b, n, d] -> [b, n, d] along a buffer; differentiable. Outputs at tokens of a halo are
        arbitrary. Sums are in fp32 (fp64 for fp64)."""


def of_gpus_alone(x: Tensor) -> str | None:
    """What all GPU kernels refuse."""
    if x.device.type != "cuda":
        return f"runs on GPUs, not on {x.device.type}"
    return "does not take float64" if x.dtype == torch.float64 else None
