"""Annotated ops: one line says how an op may be cut, and engines cut it.

.. include:: docs/annotations.md
"""

from typing import TYPE_CHECKING, Any

from .engines.config import ComputeConfig
from .errors import AnnotationError, AnnotationSyntaxError, BindingError, PartitionError
from .groups import group_named
from .library.declaration import register_op
from .parallel import parallelize
from .registry import AnnotatedOp, OpRecord, record_of, registered_ops
from .rules import Communicates, InnerCost, Order, Orders, PartitionRule, SplitSite, Told

if TYPE_CHECKING:
    from .engines.torch import ParallelModule


def __getattr__(name: str) -> Any:
    """Import the embedded engine on first use: it needs scipy and torch.export, ops do not."""
    if name == "ParallelModule":
        from .engines.torch import ParallelModule

        return ParallelModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AnnotatedOp",
    "AnnotationError",
    "AnnotationSyntaxError",
    "BindingError",
    "Communicates",
    "ComputeConfig",
    "InnerCost",
    "OpRecord",
    "Order",
    "Orders",
    "ParallelModule",
    "PartitionError",
    "PartitionRule",
    "SplitSite",
    "Told",
    "group_named",
    "parallelize",
    "record_of",
    "register_op",
    "registered_ops",
]
