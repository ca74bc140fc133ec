"""The embedded engine: torch.export and DTensor, nothing else to install.

capture -> strategies -> permute    -> plan          -> run                    -> module
(graph)    (of each op)  (order of     (one strategy    (on DTensors, or          (ParallelModule,
                          tokens)       of each op)      on plain tensors)         parallelize)

Imports go from right to left; run needs neither permute nor plan. rates has the machine's speeds.
Planning puts a sequence in another order, once, if its contiguous parts are then equal work.

.. include:: ../../docs/planning.md
.. include:: ../../docs/training.md
"""

from ..config import as_own as as_config
from .capture.capture import CaptureError
from .module.entry import parallelize
from .module.parallel_module import ParallelModule
from .plan.dry_run import plan_without_ranks, plans_without_ranks
from .plan.engine_plan import EnginePlan
from .plan.policies import Policy, PolicyError
from .plan.solver import PlanningError
from .rates import Link, Rates, calibrate
from .run.lowered import LoweringError
from .strategies.choices import OpSite

__all__ = [
    "CaptureError",
    "EnginePlan",
    "Link",
    "LoweringError",
    "OpSite",
    "ParallelModule",
    "PlanningError",
    "Policy",
    "PolicyError",
    "Rates",
    "as_config",
    "calibrate",
    "parallelize",
    "plan_without_ranks",
    "plans_without_ranks",
]
