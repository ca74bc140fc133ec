"""Single-device attention kernels behind one protocol; :func:`choose` picks one.

.. include:: ../../docs/kernels.md
"""

from .choice import KERNELS, KernelError, check_name, choose, refusal
from .protocol import (
    FEATURES,
    LARGE,
    BackwardOperands,
    Capabilities,
    ForwardOperands,
    Kernel,
    Pairs,
    Request,
    Scoring,
    Tokens,
)

__all__ = [
    "FEATURES",
    "KERNELS",
    "LARGE",
    "BackwardOperands",
    "Capabilities",
    "ForwardOperands",
    "Kernel",
    "KernelError",
    "Pairs",
    "Request",
    "Scoring",
    "Tokens",
    "check_name",
    "choose",
    "refusal",
]
