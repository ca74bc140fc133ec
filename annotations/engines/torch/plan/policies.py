"""Policies: what the user has decided before the planner fills in the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from annotations.binding import BoundAnnotation
from annotations.registry import record_of

from ...config import ComputeConfig
from ..capture.nodes import arguments_of
from ..strategies.op_strategies import Strategy
from .repeats import module_of


class PolicyError(ValueError):
    """A policy asks for something that the graph or an annotation does not allow."""


@dataclass(frozen=True)
class OpSite:
    """An annotated op in the captured graph, as a policy sees it.

    Attributes:
        name: unique in the graph, e.g. ``ring_attn_1``.
        op: the op's title, e.g. ``wrap_ring_attn_func``.
        module: path of the module that called it, e.g. ``layers.1.attention``.
        splits: identifiers it can be split on, along some axis of the mesh.
        communicates: those of them that communicate inside the op.
        bindings: its annotation over the call's shapes, all alternatives.
    """

    name: str
    op: str
    module: str
    splits: tuple[str, ...]
    communicates: tuple[str, ...]
    bindings: tuple[BoundAnnotation, ...] = field(repr=False)


# What an op is forced to: an identifier, along some axis; None (or "whole") for whole on every
# rank; of an op without annotation, or a parameter, the dim that is cut. A tuple says it for each
# axis of the mesh. "any" leaves it to the planner.
Force = str | int | tuple[str | int | None, ...] | None

# From the annotated ops to what is forced, by name; ops left out are the planner's to decide. A
# name is an op's, a module's path or a parameter's, or a pattern of them as of fnmatch.
Policy = Callable[[Sequence[OpSite], ComputeConfig], Mapping[str, Force]]

HEADS = ("g", "h", "qh")


def shard_sequence(ops: Sequence[OpSite], config: ComputeConfig) -> dict[str, Force]:
    """``"cp"``: split every op that communicates inside on its sequence: ``l``, or ``lq`` where
    only that of q is to be cut; one that has neither, on the first that communicates, by name."""
    chosen: dict[str, Force] = {}
    for op in filter(_communicates, ops):
        inside = [split for split in ("l", "lq", *op.communicates) if split in op.splits]
        if not inside:
            raise PolicyError(cannot("cp", op, " or ".join(op.communicates), config))
        chosen[op.name] = inside[0]
    return _some("cp", chosen, "no op that communicates inside is called")


def shard_batch(ops: Sequence[OpSite], config: ComputeConfig) -> dict[str, Force]:
    """``"dp"``: split every op that communicates otherwise on its batch."""
    for op in filter(_communicates, ops):
        if "b" not in op.splits:
            raise PolicyError(cannot("dp", op, "b", config))
    chosen: dict[str, Force] = {op.name: "b" for op in filter(_communicates, ops)}
    return _some("dp", chosen, "no op that communicates inside is called")


def _communicates(op: OpSite) -> bool:
    return bool(op.communicates)


def shard_heads(policy: str) -> Policy:
    """``"tp"``, ``"ulysses"``: split attention on heads, of q alone where k has too few."""

    def heads(ops: Sequence[OpSite], config: ComputeConfig) -> dict[str, Force]:
        chosen: dict[str, Force] = {
            op.name: _heads(policy, op, config) for op in ops if _has_heads(op)
        }
        return _some(policy, chosen, "no op with heads is called")

    return heads


def shard_both(ops: Sequence[OpSite], config: ComputeConfig) -> dict[str, Force]:
    """``"hybrid"``: attention on the sequence along the first axis and on heads along the second,
    which joins the nearer ranks."""
    if len(config.mesh_shape) != 2:
        raise PolicyError(
            "policy 'hybrid' needs a mesh of two axes, the sequence's and the heads': give "
            'pas_config={"mesh_shape": (a, b)} with a * b = plan_ngpus = '
            f"{config.plan_ngpus}"
        )
    chosen: dict[str, Force] = {
        op.name: ("l", _heads("hybrid", op, config))
        for op in ops
        if _has_heads(op) and "l" in op.splits
    }
    return _some("hybrid", chosen, "no op with heads and a sequence is called")


def _has_heads(op: OpSite) -> bool:
    return any(name in bound.sizes for bound in op.bindings for name in HEADS)


def _heads(policy: str, op: OpSite, config: ComputeConfig) -> str:
    found = next((name for name in HEADS if name in op.splits), None)
    if found is None:
        wanted = next(name for name in HEADS for bound in op.bindings if name in bound.sizes)
        raise PolicyError(cannot(policy, op, wanted, config))
    return found


def leave_open(ops: Sequence[OpSite], config: ComputeConfig) -> dict[str, Force]:
    """``"auto"``: everything is the planner's to decide."""
    return {}


POLICIES: dict[str, Policy] = {
    "cp": shard_sequence,
    "dp": shard_batch,
    "auto": leave_open,
    "tp": shard_heads("tp"),
    "ulysses": shard_heads("ulysses"),
    "hybrid": shard_both,
}

# What a policy says of parameters: "free" to be kept in parts; "whole" (the default); "read whole",
# so that ops are cut on their tokens alone; or "cut": those of linears are kept in parts and read
# as they are kept.
PARAMETERS = {"auto": "free", "tp": "cut", "ulysses": "read whole", "hybrid": "read whole"}


def cannot(policy: str, op: OpSite, wanted: str, config: ComputeConfig) -> str:
    """The error of a split that an op does not allow over so many ranks."""
    sizes = next((bound.sizes for bound in op.bindings if wanted in bound.sizes), {})
    why = f" ({wanted!r} = {sizes[wanted]})" if wanted in sizes else ""
    shape = config.mesh_shape
    over = f"{config.plan_ngpus} ranks" if len(shape) == 1 else f"a mesh of {shape}"
    return (
        f"policy {policy!r}: {op.name} ({op.op} in {op.module or 'the module'}) cannot be split on "
        f"{wanted}{why} over {over}; it can on: {', '.join(op.splits) or 'nothing'}"
    )


def _some(policy: str, chosen: dict[str, Force], why: str) -> dict[str, Force]:
    if not chosen:
        raise PolicyError(
            f"policy {policy!r} has nothing to split: {why} in the captured module; "
            "a policy function can split other annotated ops"
        )
    return chosen


def sites(graph: Graph, strategies: Mapping[Node, list[Strategy]]) -> list[OpSite]:
    """The annotated ops of a graph, in order."""
    found = []
    for node in graph.nodes:
        record = record_of(node.target)
        if record is None:
            continue
        found.append(
            OpSite(
                name=node.name,
                op=record.title,
                module=module_of(node),
                splits=tuple(
                    dict.fromkeys(name for s in strategies[node] for name in s.split if name)
                ),
                communicates=tuple(sorted(record.rule.communicates)),
                bindings=record.bindings(arguments_of(node, record)),
            )
        )
    return found


def named(policy: str | Mapping[str, Force] | Policy) -> tuple[Policy, str]:
    """The policy of a name, a mapping or a function, and what it says of parameters.

    Raises:
        PolicyError: no policy has this name, or it is something else.
    """
    if isinstance(policy, Mapping):

        def mapping(ops: Sequence[OpSite], config: ComputeConfig) -> Mapping[str, Force]:
            return policy

        return mapping, "whole"
    if callable(policy):
        return policy, "whole"
    if not isinstance(policy, str) or policy not in POLICIES:
        raise PolicyError(f"pas_policy {policy!r} is unknown; known: {', '.join(POLICIES)}")
    return POLICIES[policy], PARAMETERS.get(policy, "whole")
