"""A plan in figures and as a text: see :mod:`.plan.report`."""

from .plan.report import Measures, measures, report

__all__ = ["Measures", "measures", "report"]
