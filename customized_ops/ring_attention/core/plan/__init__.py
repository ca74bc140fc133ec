"""Plans: from a mask and layouts to what each rank receives and computes.

Each stage imports only the stages before it: who computes what (:mod:`.assign`) and moves, a plan's
work (:mod:`.planned_work`), the value (:mod:`.plan_value`), predicted times and bounds of a value
(:mod:`.cost_model`, :mod:`.bounds`), its course in time (:mod:`.simulate`), how plans are chosen
and shown by these (:mod:`.choose`, :mod:`.report`), and on top the class for users (:mod:`.plan`).

.. include:: ../../docs/plans.md
"""

from .plan import Plan, make_plan

__all__ = ["Plan", "make_plan"]
