"""What ops that run along a sequence share: linear attention and short convolutions.

.. include:: docs/along_sequence.md
"""

from .segments import LocalSegments, Segments, segments_of

__all__ = ["LocalSegments", "Segments", "segments_of"]
