"""Linear attention, state spaces and the gated delta rule over sharded sequences, as annotated ops.

.. include:: docs/linear_attention.md
"""

from .functions import wrap_gated_delta_rule_func, wrap_gated_linear_attn_func

__all__ = ["wrap_gated_delta_rule_func", "wrap_gated_linear_attn_func"]
