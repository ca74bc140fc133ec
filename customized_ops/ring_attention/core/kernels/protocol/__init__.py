"""The protocol of kernels: ``kernel`` has what a kernel is and is given, ``scoring`` what scores
become, and dropout's random numbers."""

from .kernel import (
    FEATURES,
    HALF,
    LARGE,
    BackwardOperands,
    Capabilities,
    ForwardOperands,
    Grads,
    Kernel,
    OutLse,
    Pairs,
    Request,
)
from .scoring import Scoring, Tokens

__all__ = [
    "FEATURES",
    "HALF",
    "LARGE",
    "BackwardOperands",
    "Capabilities",
    "ForwardOperands",
    "Grads",
    "Kernel",
    "OutLse",
    "Pairs",
    "Request",
    "Scoring",
    "Tokens",
]
