"""The embedded engine: torch.export and DTensor, nothing else to install.

capture -> strategies -> planner -> execute          report: the plan as a table
(graph)    (per op)      (one each)  (on DTensors)   module: ParallelModule, parallelize
"""

from ..config import as_own as as_config
from .capture import CaptureError
from .module import ParallelModule, parallelize
from .policies import OpSite, Policy, PolicyError
from .report import EnginePlan

__all__ = [
    "CaptureError",
    "EnginePlan",
    "OpSite",
    "ParallelModule",
    "Policy",
    "PolicyError",
    "as_config",
    "parallelize",
]
