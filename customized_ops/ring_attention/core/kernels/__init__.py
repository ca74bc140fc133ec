"""Single-device attention kernels behind one protocol; :func:`choose` picks one.

.. include:: ../../docs/kernels.md
"""

from .choice import KERNELS, KernelError, check_name, choose, refusal
from .operands import BackwardOperands, Pairs
from .protocol import FEATURES, LARGE, Capabilities, Kernel, Request
from .scoring import Scoring, Tokens

__all__ = [
    "FEATURES",
    "KERNELS",
    "LARGE",
    "BackwardOperands",
    "Capabilities",
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
