"""The embedded engine: torch.export and DTensor, nothing else to install.

capture -> strategies -> plan           ->  run                        report: a plan as a table
(graph)    (of each op)  (one of each)      (on DTensors, or lowered    module: ParallelModule, and
                                             to plain tensors)           parallelize in entry

In between, permute puts a sequence in another order, once, so that contiguous parts are even work.

plan: rates (speeds, measured), dry_run (plans without ranks), limits (policies, plans as policies)

.. include:: ../../docs/planning.md
.. include:: ../../docs/training.md
"""

from ..config import as_own as as_config
from .capture.capture import CaptureError
from .module.entry import parallelize
from .module.parallel_module import ParallelModule
from .plan.dry_run import plan_without_ranks, plans_without_ranks
from .plan.engine_cost import Link, Rates
from .plan.policies import OpSite, Policy, PolicyError
from .plan.rates import calibrate
from .plan.solver import PlanningError
from .report.engine_plan import EnginePlan
from .run.lowered import LoweringError

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
