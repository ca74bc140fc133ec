"""What a plan should take on given hardware: see :mod:`.plan.cost_model`."""

from .plan.cost_model import H200, CostModel

__all__ = ["H200", "CostModel"]
