"""Linear attention on one device: kernels behind one protocol."""

from .choice import KERNELS, choose
from .protocol import Gradients, Kernel, Operands

__all__ = ["KERNELS", "Gradients", "Kernel", "Operands", "choose"]
