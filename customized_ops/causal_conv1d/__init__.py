"""Short causal convolutions over sharded sequences, as an annotated op.

.. include:: docs/causal_conv1d.md
"""

from .functions import wrap_causal_conv1d_func

__all__ = ["wrap_causal_conv1d_func"]
