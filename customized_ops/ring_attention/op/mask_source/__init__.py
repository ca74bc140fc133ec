"""How a call says which pairs attend: the one thing in which attention ops differ.

    OneSequence     causal, a window and sink tokens, over [b, l, h, d]
    Documents       the same inside each packed document, over [l, h, d] and cumulative lengths
    Masked          any AttnMask, over [b, l, h, d]

A source holds what the user passed, unchecked, or what an op in a graph was given
(:meth:`MaskSource.decode`), which is sound. Only of the second are masks asked.
"""

from .documents import Documents
from .masked import Masked
from .one_sequence import OneSequence
from .source import Arguments, MaskSource, Problem, Shards, has_data

__all__ = [
    "Arguments",
    "Documents",
    "MaskSource",
    "Masked",
    "OneSequence",
    "Problem",
    "Shards",
    "has_data",
]
