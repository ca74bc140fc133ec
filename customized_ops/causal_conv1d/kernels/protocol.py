"""What a kernel of the convolution is: it runs along a rank's buffer on one device.

y_t = act(bias + Σ_j weight_j x_{t - width + 1 + j})        tokens before the document are 0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..halo import Halo

ACTIVATIONS = ("", "silu", "swish")  # the last two are one function


@dataclass(frozen=True)
class Filter:
    """What is convolved with.

    Attributes:
        weight: [d, width]. bias: [d] or None. activation: one of :data:`ACTIVATIONS`.
    """

    weight: Tensor
    bias: Tensor | None
    activation: str


class Kernel(Protocol):
    """The convolution on one device. Importing it imports no optional package."""

    NAME: str

    def missing(self) -> str | None:
        """What keeps the kernel from running on this machine, or None."""

    def refuses(self, x: Tensor) -> str | None:
        """Why it cannot run along x, from dtype and device alone; or None."""

    def unproven(self, x: Tensor) -> str | None:
        """Why what it can run is not left to it unless by name; or None."""

    def convolve(self, x: Tensor, filter_: Filter, halo: Halo) -> Tensor:
        """[b, n, d] -> [b, n, d] of a buffer; differentiable. Tokens of a halo give anything. Sums
        are in fp32 (fp64 for fp64)."""
