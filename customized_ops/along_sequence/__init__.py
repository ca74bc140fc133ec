"""What ops that run along a sequence share: linear attention and short convolutions.

.. include:: docs/along_sequence.md
"""

from ..ring_attention.core.plan.exchanges.between_layouts import wanted_exchange
from ..ring_attention.op.arguments import checked
from .arguments import call_segments, check_tensors, checked_documents, checked_segments, facts_of
from .kernel_choice import KernelChoice
from .rule import public_call, segments_when_cut, sequence_rule
from .segments import LocalSegments, Segments, segments_of

__all__ = [
    "KernelChoice",
    "LocalSegments",
    "Segments",
    "call_segments",
    "check_tensors",
    "checked",
    "checked_documents",
    "checked_segments",
    "facts_of",
    "public_call",
    "segments_of",
    "segments_when_cut",
    "sequence_rule",
    "wanted_exchange",
]
