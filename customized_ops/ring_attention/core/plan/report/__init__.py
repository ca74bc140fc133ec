"""A plan in figures, as a text and as a picture."""

from .figures import Measures, measures
from .text import report

__all__ = ["Measures", "measures", "report"]
