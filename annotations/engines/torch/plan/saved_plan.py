"""A plan made before as a policy: perhaps edited, from memory or from a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..report.engine_plan import EnginePlan, OpPlacements, Split, places_text
from ..strategies.choices import Choices
from ..strategies.op_strategies import Strategy
from .limits import Limits
from .policies import PolicyError


def is_path(policy: Any) -> bool:
    """Whether a policy names a file: a path, or a string that ends in ``.json``."""
    named = isinstance(policy, str) and policy.endswith(".json")
    return named or isinstance(policy, os.PathLike)


def as_plan(policy: Any) -> Any:
    """``policy``, or the plan in the file that it names."""
    if not is_path(policy):
        return policy
    try:
        return EnginePlan.from_json(Path(policy).read_text())
    except ValueError as error:
        raise PolicyError(f"{os.fspath(policy)}: {error}") from None


def limits_of_plan(plan: EnginePlan, choices: Choices) -> Limits:
    """Each op and parameter as the plan has it; ops that it leaves out are open, and parameters
    are whole.

    Raises:
        PolicyError: it is for another module, other shapes or another mesh, or it has been edited
            to something that an op does not allow.
    """
    if plan.mesh_shape != choices.parts:
        raise PolicyError(f"the plan is for a mesh of {plan.mesh_shape}, not of {choices.parts}")
    limits = Limits()
    by_name = {node.name: node for node in choices.strategies}
    for verb, names in (("splits", plan.splits), ("names", plan.ops)):
        if strange := next((name for name in names if name not in by_name), None):
            raise PolicyError(f"the plan {verb} {strange}, which is no op of the graph")
    for name, split in plan.splits.items():
        node, wanted = by_name[name], each_axis(split)
        if name in plan.ops and plan.ops[name].split != wanted:
            raise PolicyError(
                f"the plan's splits have {name} on {wanted}, and its ops on "
                f"{plan.ops[name].split}; change both, or leave it out of the ops"
            )
        if not limits.keep(node, choices, lambda s, w=wanted: s.split == w):  # type: ignore[misc]
            can = ", ".join(dict.fromkeys(str(s.split) for s in choices.strategies[node]))
            raise PolicyError(
                f"the plan splits {name} on {wanted}, but it can only be split on {can}"
            )
    for name, placed in plan.ops.items():
        node = by_name[name]
        if not limits.keep(node, choices, lambda s, p=placed: OpPlacements.of(s) == p):  # type: ignore[misc]
            options = "\n    ".join(dict.fromkeys(map(_shown, choices.strategies[node])))
            raise PolicyError(f"the plan has {name} as {placed}, but it can only be\n    {options}")
    whole = ",".join("R" for _ in choices.parts)
    for node, path in choices.parameters.items():
        kept = plan.parameters.get(path, whole)
        if not limits.keep(node, choices, lambda s, k=kept: places_text(s.outputs[0]) == k):  # type: ignore[misc]
            raise PolicyError(f"the plan keeps {path} as {kept!r}, which it cannot be")
    return limits


def each_axis(split: Split) -> tuple[str | None, ...]:
    """For each axis of the mesh what an op is split on."""
    return split if isinstance(split, tuple) else (split,)


def _shown(strategy: Strategy) -> str:
    placed = OpPlacements.of(strategy)
    text = f"{' '.join(placed.inputs)} -> {' '.join(placed.outputs)}"
    if not any(placed.split):
        return text
    return f"{text} (split {', '.join(name or '-' for name in placed.split)})"
