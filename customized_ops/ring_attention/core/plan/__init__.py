"""Plans: from a mask and layouts to what each rank receives and computes.

.. include:: ../../docs/plans.md
"""

from .plan import Plan, make_plan

__all__ = ["Plan", "make_plan"]
