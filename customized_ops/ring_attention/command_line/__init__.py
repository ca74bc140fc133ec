"""The commands of ``python -m customized_ops.ring_attention``, one a file."""
