"""Sequence-parallel attention as annotated ops.

Same names, arguments and order as nnscaler's ``customized_ops.ring_attention``.
"""

from .core.inprocess import run_ranks
from .core.layout import Layout
from .core.mask import AttnMask
from .core.plan import Plan, make_plan
from .ring_attn import wrap_ring_attn_func
from .ring_attn_varlen import wrap_ring_attn_varlen_func
from .zigzag_attn import wrap_zigzag_attn_func

__all__ = [
    "AttnMask",
    "Layout",
    "Plan",
    "make_plan",
    "run_ranks",
    "wrap_ring_attn_func",
    "wrap_ring_attn_varlen_func",
    "wrap_zigzag_attn_func",
]
