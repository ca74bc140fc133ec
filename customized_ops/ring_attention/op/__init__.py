"""How an attention call becomes a plan and a kernel, with and without a graph.

What the file of an attention op needs is named here.
"""

from .cu_seqlens import CuSeqlens
from .documentation import attention_function
from .eager import attend
from .graph import declare, declare_both
from .mask_source import Masked
from .options import SharedOptions
from .window_source import Documents, OneSequence

__all__ = [
    "CuSeqlens",
    "Documents",
    "Masked",
    "OneSequence",
    "SharedOptions",
    "attend",
    "attention_function",
    "declare",
    "declare_both",
]
