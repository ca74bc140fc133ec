"""The convolution on one device: kernels behind one protocol."""

from typing import cast

from ...along_sequence.kernel_choice import KernelChoice
from . import fla, torch_sums
from .protocol import ACTIVATIONS, Filter, Kernel

KERNELS: dict[str, Kernel] = {kernel.NAME: cast(Kernel, kernel) for kernel in (fla, torch_sums)}
CHOICE = KernelChoice(KERNELS)

__all__ = ["ACTIVATIONS", "CHOICE", "KERNELS", "Filter", "Kernel"]
