"""Policies: what the user has decided before the planner fills in the rest."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config import ComputeConfig
from ..strategies.choices import OpSite
from .engine_plan import EnginePlan


class PolicyError(ValueError):
    """A policy asks for something that the graph or an annotation does not allow."""


# What an op is forced to: an identifier to split on along some axis, or None (or "whole") to be
# whole on every rank. For an op without annotation, or a parameter, it is the dim that is cut. A
# tuple has an entry for each axis of the mesh. "any" leaves the choice to the planner.
Force = str | int | tuple[str | int | None, ...] | None

# Takes the annotated ops and returns what is forced, by name; the planner decides ops that are left
# out. A name is an op's, a module's path, a parameter's, one from the plan's table, or an fnmatch
# pattern of such names.
Policy = Callable[[Sequence[OpSite], ComputeConfig], Mapping[str, Force]]

AnyPolicy = str | EnginePlan | Policy | Mapping[str, Force]


INSIDE = "that communicates inside"  # kind of ops


@dataclass(frozen=True)
class SplitEach:
    """A named policy: every op of a kind is split on the first of its dims that it can be split on.

    Attributes:
        kind: which ops these are, in words.
        dims: the dims to try for an op of this kind, in order; empty for any other op.
    """

    name: str
    kind: str
    dims: Callable[[OpSite], Sequence[str]]

    def __call__(self, ops: Sequence[OpSite], config: ComputeConfig) -> dict[str, str]:
        """What each op is split on. Raises PolicyError if an op of the kind cannot be split on any
        of its dims, or if there is no such op."""
        chosen = {}
        for op in ops:
            if dims := self.dims(op):
                found = [dim for dim in dims if dim in op.splits]
                if not found:
                    inside = dict.fromkeys(dim for dim in dims if dim in op.communicates)
                    wanted = " or ".join(inside) or dims[0]
                    raise PolicyError(cannot(self.name, op, wanted, config))
                chosen[op.name] = found[0]
        if not chosen:
            raise PolicyError(
                f"policy {self.name!r} has nothing to split: no op {self.kind} is called in the "
                "captured module; a policy function can split other annotated ops"
            )
        return chosen


def _heads(op: OpSite) -> Sequence[str]:
    """Dims of heads, in order: ``g``, or ``h`` where q and k have equally many; then ``qh``, the
    heads of q alone, for when k has too few."""
    return [dim for dim in ("g", "h", "qh") if any(dim in bound.sizes for bound in op.bindings)]


def shard_both(ops: Sequence[OpSite], config: ComputeConfig) -> dict[str, Force]:
    """``"hybrid"``: attention on the sequence along the first axis and on heads along the second,
    which joins the nearer ranks."""
    if len(config.mesh_shape) != 2:
        raise PolicyError(
            "policy 'hybrid' needs a mesh of two axes, the sequence's and the heads': give "
            'pas_config={"mesh_shape": (a, b)} with a * b = plan_ngpus = '
            f"{config.plan_ngpus}"
        )
    both = [op for op in ops if "l" in op.splits]
    heads = SplitEach("hybrid", "with heads and a sequence", _heads)(both, config)
    return {name: ("l", dim) for name, dim in heads.items()}


# lq is the sequence of q alone. For an op with neither, the identifiers that communicate are tried,
# by name.
shard_sequence = SplitEach(
    "cp", INSIDE, lambda op: ("l", "lq", *op.communicates) if op.communicates else ()
)

# Policies by name, with what each says about parameters: "free" to be sharded; "whole", as under
# all policies without a name; "read whole", so that ops are cut on their tokens alone; or "cut":
# those of linears are sharded and read as they are kept.
POLICIES: dict[str, tuple[Policy, str]] = {
    "cp": (shard_sequence, "whole"),
    "dp": (SplitEach("dp", INSIDE, lambda op: ("b",) if op.communicates else ()), "whole"),
    "auto": (lambda ops, config: {}, "free"),
    "tp": (SplitEach("tp", "with heads", _heads), "cut"),
    "ulysses": (SplitEach("ulysses", "with heads", _heads), "read whole"),
    "hybrid": (shard_both, "read whole"),
}


def named(policy: str | Mapping[str, Force] | Policy) -> tuple[Policy, str]:
    """The policy for a name, a mapping or a function, and what it says about parameters. Raises
    PolicyError if no policy has this name, or if ``policy`` is something else."""

    def mapping(ops: Sequence[OpSite], config: ComputeConfig) -> Mapping[str, Force]:
        return policy  # type: ignore[return-value]

    if isinstance(policy, Mapping):
        return mapping, "whole"
    if callable(policy):
        return policy, "whole"
    if not isinstance(policy, str) or policy not in POLICIES:
        raise PolicyError(f"pas_policy {policy!r} is unknown; known: {', '.join(POLICIES)}")
    return POLICIES[policy]


def of_what_is_left(policy: AnyPolicy, gone: Collection[str], left: Collection[str]) -> AnyPolicy:
    """A policy for a graph from which some ops are gone, without what it says about only those.

    Args:
        gone, left: names of the ops that are gone, and of the other ops and the parameters.
    """

    def kept(forces: Mapping[str, Force]) -> dict[str, Force]:
        return {
            pattern: force
            for pattern, force in forces.items()
            if fnmatch.filter(left, pattern) or not fnmatch.filter(gone, pattern)
        }

    if isinstance(policy, Mapping):
        return kept(policy)
    if callable(policy):
        return lambda ops, config: kept(policy(ops, config))
    return policy


def is_path(policy: Any) -> bool:
    """Whether a policy names a plan's file: a path, or a string that ends in ``.json``."""
    written = isinstance(policy, str) and policy.endswith(".json")
    return written or isinstance(policy, os.PathLike)


def as_plan(policy: Any) -> Any:
    """``policy``, or the plan in the file that it names."""
    if not is_path(policy):
        return policy
    try:
        return EnginePlan.from_json(Path(policy).read_text())
    except ValueError as error:
        raise PolicyError(f"{os.fspath(policy)}: {error}") from None


def cannot(policy: str, op: OpSite, wanted: str, config: ComputeConfig) -> str:
    """The error text for a split that an op does not allow over so many ranks."""
    sizes = next((bound.sizes for bound in op.bindings if wanted in bound.sizes), {})
    why = f" ({wanted!r} = {sizes[wanted]})" if wanted in sizes else ""
    shape = config.mesh_shape
    over = f"{config.plan_ngpus} ranks" if len(shape) == 1 else f"a mesh of {shape}"
    return (
        f"policy {policy!r}: {op.title} cannot be split on {wanted}{why} over {over}; it can on: "
        f"{', '.join(op.splits) or 'nothing'}"
    )
