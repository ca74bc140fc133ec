"""Linear attention on one device: kernels behind one protocol."""

from typing import cast

from ...along_sequence.kernel_choice import KernelChoice
from . import fla, torch_chunks
from .protocol import Backward, Forward, Gradients, Kernel, Operands

KERNELS: dict[str, Kernel] = {each.NAME: cast(Kernel, each) for each in (fla, torch_chunks)}
CHOICE = KernelChoice(KERNELS)

__all__ = ["CHOICE", "KERNELS", "Backward", "Forward", "Gradients", "Kernel", "Operands"]
