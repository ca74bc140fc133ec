"""Linear attention on one device: kernels behind one protocol."""

from .choice import KERNELS, choose
from .protocol import Backward, Forward, Gradients, Kernel, Operands

__all__ = ["KERNELS", "Backward", "Forward", "Gradients", "Kernel", "Operands", "choose"]
