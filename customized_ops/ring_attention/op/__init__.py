"""How an attention call becomes a plan and a kernel, with and without a graph.

What the file of an attention op needs is named here.
"""

from .documentation import attention_function
from .eager import attend
from .graph import declare, declare_both
from .mask_source import Masked
from .options import SharedOptions
from .tokens.lengths import CuSeqlens
from .window_source import OneSequence, PackedSequence

__all__ = [
    "CuSeqlens",
    "Masked",
    "OneSequence",
    "PackedSequence",
    "SharedOptions",
    "attend",
    "attention_function",
    "declare",
    "declare_both",
]
