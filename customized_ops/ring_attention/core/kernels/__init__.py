"""Single-device attention kernels behind one protocol; :func:`choose` picks one.

.. include:: ../../docs/kernels.md
"""

from .choice import KERNELS, KernelError, check_name, choose, refusal
from .protocol.kernel import BackwardOperands, ForwardOperands, Kernel, Pairs
from .protocol.request import FEATURES, LARGE, Capabilities, Request
from .protocol.scoring import Scoring, Tokens

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
