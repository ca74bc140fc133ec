"""Policies: which splits the user has decided before the planner fills in the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from annotations.binding import BoundAnnotation
from annotations.errors import PartitionError
from annotations.registry import record_of
from annotations.rules import PartitionRule

from ..config import ComputeConfig
from .strategies import Strategy, arguments_of


class PolicyError(ValueError):
    """A policy asks for something that the graph or an annotation does not allow."""


@dataclass(frozen=True)
class OpSite:
    """An annotated op in the captured graph, as a policy sees it.

    Attributes:
        name: unique in the graph, e.g. ``ring_attn_1``.
        op: the op's title, e.g. ``wrap_ring_attn_func``.
        module: path of the module that called it, e.g. ``layers.1.attention``.
        splits: identifiers it can be split on over this many ranks.
        communicates: those of them that communicate inside the op.
        bindings: its annotation over the call's shapes, all alternatives.
    """

    name: str
    op: str
    module: str
    splits: tuple[str, ...]
    communicates: tuple[str, ...]
    bindings: tuple[BoundAnnotation, ...] = field(repr=False)


# From the annotated ops to the split of each by name; None runs it whole on every rank. Ops left
# out are the planner's to decide.
Policy = Callable[[Sequence[OpSite], ComputeConfig], Mapping[str, str | None]]


def shard_sequence(ops: Sequence[OpSite], config: ComputeConfig) -> dict[str, str | None]:
    """``"cp"``: split every op that communicates inside on its sequence: ``l``, or ``lq`` where
    only that of q is to be cut; one that has neither, on the first that communicates, by name."""
    chosen: dict[str, str | None] = {}
    for op in ops:
        inside = [split for split in ("l", "lq", *op.communicates) if split in op.splits]
        if op.communicates:
            if not inside:
                raise PolicyError(_cannot("cp", op, " or ".join(op.communicates), config))
            chosen[op.name] = inside[0]
    return _some("cp", chosen, "no op that communicates inside is called")


def shard_batch(ops: Sequence[OpSite], config: ComputeConfig) -> dict[str, str | None]:
    """``"dp"``: split every op that communicates otherwise on its batch."""
    chosen: dict[str, str | None] = {}
    for op in ops:
        if op.communicates:
            if "b" not in op.splits:
                raise PolicyError(_cannot("dp", op, "b", config))
            chosen[op.name] = "b"
    return _some("dp", chosen, "no op that communicates inside is called")


POLICIES: dict[str, Policy] = {"cp": shard_sequence, "dp": shard_batch}


def _cannot(policy: str, op: OpSite, wanted: str, config: ComputeConfig) -> str:
    sizes = next((bound.sizes for bound in op.bindings if wanted in bound.sizes), {})
    why = f" ({wanted!r} = {sizes[wanted]})" if wanted in sizes else ""
    return (
        f"policy {policy!r}: {op.name} ({op.op} in {op.module or 'the module'}) cannot be split on "
        f"{wanted}{why} over {config.plan_ngpus} ranks; it can on: "
        f"{', '.join(op.splits) or 'nothing'}"
    )


def _some(policy: str, chosen: dict[str, str | None], why: str) -> dict[str, str | None]:
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
        stack = list(node.meta.get("nn_module_stack", {}).values())
        rule: PartitionRule = record.rule
        found.append(
            OpSite(
                name=node.name,
                op=record.title,
                module=stack[-1][0].removeprefix("L['self'].") if stack else "",
                splits=tuple(dict.fromkeys(s.identifier for s in strategies[node] if s.identifier)),
                communicates=tuple(sorted(rule.communicates)),
                bindings=record.bindings(arguments_of(node, record)),
            )
        )
    return found


def named(policy: str | Policy) -> Policy:
    """The policy of a name; a function stays.

    Raises:
        PolicyError: no policy has this name.
    """
    if not isinstance(policy, str):
        return policy
    if policy not in POLICIES:
        raise PolicyError(f"pas_policy {policy!r} is unknown; known: {', '.join(POLICIES)}")
    return POLICIES[policy]


def apply(policy: Policy, ops: Sequence[OpSite], config: ComputeConfig) -> dict[str, str | None]:
    """The splits that ``policy`` forces, checked.

    Raises:
        PolicyError: unknown op, or a split that the op does not allow over so many ranks.
        PartitionError: a split that the op's annotation does not allow over any.
    """
    name = getattr(policy, "__name__", "policy")
    chosen = policy(ops, config)
    if not isinstance(chosen, Mapping):
        raise PolicyError(f"{name} must return a mapping from op names to splits, got {chosen!r}")
    by_name = {op.name: op for op in ops}
    unknown = sorted(set(chosen) - set(by_name))
    if unknown:
        raise PolicyError(
            f"the policy names {', '.join(unknown)}, but the annotated ops are: "
            f"{', '.join(by_name) or 'none'}"
        )
    for op, split in chosen.items():
        if split is not None and split not in by_name[op].splits:
            _check_annotation(name, by_name[op], split, config)
            raise PolicyError(_cannot(name, by_name[op], split, config))
    return dict(chosen)


def _check_annotation(policy: str, op: OpSite, split: str, config: ComputeConfig) -> None:
    if any(split == allowed.identifier for bound in op.bindings for allowed in bound.splits()):
        return
    try:
        op.bindings[0].split(split)
    except PartitionError as error:
        # The annotation's own list knows neither sizes nor alternatives.
        details = [line for line in error.details if not line.startswith("can be split")]
        can = ", ".join(map(repr, op.splits)) or "nothing"
        details += [
            f"can be split over {config.plan_ngpus} ranks: {can}",
            f"asked for by policy {policy!r} for {op.name} in {op.module or 'the module'}",
        ]
        raise PartitionError(error.problem, error.text, error.span, details, error.op) from None
