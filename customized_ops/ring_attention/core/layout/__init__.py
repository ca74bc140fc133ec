"""Layouts: which rank holds which tokens of a sequence, and in which order.

.. include:: ../../docs/layouts.md
"""

from .layout import Layout
from .layout_arguments import LayoutError

__all__ = ["Layout", "LayoutError"]
