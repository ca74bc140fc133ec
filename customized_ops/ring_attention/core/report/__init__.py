"""A plan in figures, as a text and as a picture."""

from .plan_report import Measures, measures, report

__all__ = ["Measures", "measures", "report"]
