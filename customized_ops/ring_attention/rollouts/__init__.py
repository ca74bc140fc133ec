"""Rollouts of a policy that share prefixes, packed in one sequence as a prefix tree.

.. include:: ../docs/prefix_trees.md
"""

from .packed import PackedRollouts, pack_rollouts
from .part import RolloutPart
from .planned import PackRollouts, rollout_parts

__all__ = ["PackRollouts", "PackedRollouts", "RolloutPart", "pack_rollouts", "rollout_parts"]
