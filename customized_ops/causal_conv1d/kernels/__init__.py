"""The convolution on one device: kernels behind one protocol."""

from typing import cast

from ...along_sequence.kernel_choice import KernelChoice
from . import dao, fla, torch_sums
from .protocol import ACTIVATIONS, Filter, Kernel, Request

KERNELS: dict[str, Kernel] = {each.NAME: cast(Kernel, each) for each in (fla, dao, torch_sums)}
CHOICE = KernelChoice(KERNELS)

__all__ = ["ACTIVATIONS", "CHOICE", "KERNELS", "Filter", "Kernel", "Request"]
