"""Plans: from a mask and layouts to what each rank receives and computes.

Each stage imports only those left of it: who computes what (:mod:`.assign`) and moves, a plan's
work (:mod:`.planned_work`), the value (:mod:`.plan_value`), predicted times and bounds of a value
(:mod:`.cost`, :mod:`.bounds`), what it does in time (:mod:`.simulate`), what is chosen and shown by
these (:mod:`.choose`, :mod:`.report`), and on top the class that users have (:mod:`.plan`).

.. include:: ../../docs/plans.md
"""

from .plan import Plan, make_plan

__all__ = ["Plan", "make_plan"]
