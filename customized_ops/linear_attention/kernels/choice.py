"""Which kernel runs a call."""

from __future__ import annotations

from typing import cast

from ...along_sequence.kernel_choice import KernelChoice
from . import fla, torch_chunks
from .protocol import Kernel, Operands

KERNELS: dict[str, Kernel] = {kernel.NAME: cast(Kernel, kernel) for kernel in (fla, torch_chunks)}
CHOICE = KernelChoice(KERNELS)
check_name = CHOICE.check_name


def choose(op: str, name: str, x: Operands) -> Kernel:
    """See :meth:`.KernelChoice.choose`."""
    return CHOICE.choose(op, name, x, x.q)
