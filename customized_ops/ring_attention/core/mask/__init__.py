"""Attention masks: :class:`AttnMask`, which holds disjoint band slices, and its errors.

.. include:: ../../docs/masks.md
"""

from .attn_mask import AttnMask
from .mask_arguments import MaskError

__all__ = ["AttnMask", "MaskError"]
