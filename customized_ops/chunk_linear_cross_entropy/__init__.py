"""Cross entropy of a linear layer without its logits, as an annotated op.

.. include:: docs/loss.md
"""

from .loss import chunk_linear_cross_entropy

__all__ = ["chunk_linear_cross_entropy"]
