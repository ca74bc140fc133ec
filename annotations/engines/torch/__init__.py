"""The embedded engine: torch.export and DTensor, nothing else to install.

capture -> strategies -> planner -> execute       -> lowered            report: the plan as a table
(graph)    (per op)      (one each)  (on DTensors)   (on plain tensors)  entry: parallelize
                                                                         module: ParallelModule

In between, label_shift takes slices off logits, and hoist puts a sequence in another order, once:
order_cut says which ops run in it, axes and op_axes which ops may, and reorder rewrites the graph.

rates: speeds, measured    rehearsal: plans without ranks    replay: plans given back

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
