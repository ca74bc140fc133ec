"""Cases of the attention ops; see ``customized_ops.ring_attention.fuzz.attention_case``."""

from customized_ops.ring_attention.fuzz.attention_case import (
    DENSE_OPS,
    SEED,
    Case,
    expected,
    gather,
    run_rank,
)

__all__ = ["DENSE_OPS", "SEED", "Case", "expected", "gather", "run_rank"]
