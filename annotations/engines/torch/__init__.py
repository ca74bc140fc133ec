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
from .capture import CaptureError
from .cost import Link, Rates
from .entry import parallelize
from .lowered import LoweringError
from .module import ParallelModule
from .policies import OpSite, Policy, PolicyError
from .rates import calibrate
from .rehearsal import plan_without_ranks, plans_without_ranks
from .report import EnginePlan
from .solver import PlanningError

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
