"""Cases of the attention ops; see ``customized_ops.ring_attention.fuzz.kinds.attention``."""

from customized_ops.ring_attention.fuzz.kinds.attention import DENSE_OPS, SEED, Case

run_rank, gather, expected = Case.run_rank, Case.gather, Case.expected

__all__ = ["DENSE_OPS", "SEED", "Case", "expected", "gather", "run_rank"]
