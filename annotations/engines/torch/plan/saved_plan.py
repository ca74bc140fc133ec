"""A plan given back as a policy: made before, perhaps edited, from memory or from a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.fx import Node

from ..report.engine_plan import EnginePlan, Lying, places_text
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
    _follow_splits(plan, choices, limits, by_name)
    for name, lying in plan.ops.items():
        if name not in by_name:
            raise PolicyError(f"the plan names {name}, which is no op of the graph")
        node = by_name[name]
        if not limits.keep(node, choices, lambda s, a=lying: _is(s, a)):  # type: ignore[misc]
            options = "\n    ".join(dict.fromkeys(map(_shown, choices.strategies[node])))
            raise PolicyError(f"the plan has {name} as {lying}, but it can only be\n    {options}")
    for node, path in choices.parameters.items():
        whole = ",".join("R" for _ in choices.parts)
        wanted = plan.parameters.get(path, whole)
        if not limits.keep(
            node,
            choices,
            lambda s, w=wanted: places_text(s.outputs[0]) == w,  # type: ignore[misc]
        ):
            raise PolicyError(f"the plan keeps {path} as {wanted!r}, which it cannot be")
    return limits


def _follow_splits(
    plan: EnginePlan, choices: Choices, limits: Limits, by_name: Mapping[str, Node]
) -> None:
    for name, split in plan.splits.items():
        if name not in by_name:
            raise PolicyError(f"the plan splits {name}, which is no op of the graph")
        each = split if isinstance(split, tuple) else (split,)
        if name in plan.ops and plan.ops[name].split != each:
            raise PolicyError(
                f"the plan's splits have {name} on {each}, and its ops on {plan.ops[name].split}; "
                "change both, or leave it out of the ops"
            )
        if not limits.keep(by_name[name], choices, lambda s, w=each: s.split == w):  # type: ignore[misc]
            can = ", ".join(dict.fromkeys(str(s.split) for s in choices.strategies[by_name[name]]))
            raise PolicyError(
                f"the plan splits {name} on {each}, but it can only be split on {can}"
            )


def _is(strategy: Strategy, lying: Lying) -> bool:
    return (
        strategy.split == lying.split
        and tuple(map(places_text, strategy.inputs)) == lying.inputs
        and tuple(map(places_text, strategy.outputs)) == lying.outputs
    )


def _shown(strategy: Strategy) -> str:
    inputs, outputs = (" ".join(map(places_text, x)) for x in (strategy.inputs, strategy.outputs))
    split = ", ".join(name or "-" for name in strategy.split) if any(strategy.split) else ""
    return f"{inputs} -> {outputs}" + (f" (split {split})" if split else "")
