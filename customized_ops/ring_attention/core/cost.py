"""What a plan should take on given hardware: see :mod:`.plan.cost`."""

from .plan.cost import H200, CostModel

__all__ = ["H200", "CostModel"]
