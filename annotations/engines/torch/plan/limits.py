"""What a policy leaves to the planner: for each op the strategies that it may still take."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import Shard
from torch.fx import Node

from annotations.errors import PartitionError
from annotations.registry import record_of

from ...config import ComputeConfig
from ..capture.capture import tensor_inputs
from ..strategies.op_strategies import Strategy
from ..strategies.placements import Places
from .policies import Force, OpSite, Policy, PolicyError, cannot
from .repeats import module_of

if TYPE_CHECKING:
    from ..strategies.choices import Choices

Keep = Callable[[Strategy], bool]


@dataclass
class Limits:
    """Attributes:
    kept: for each op that is limited, the numbers of its strategies that it may take.
    used_as_kept: parameters that are read as they are kept.
    """

    kept: dict[Node, tuple[int, ...]] = field(default_factory=dict)
    used_as_kept: set[Node] = field(default_factory=set)

    def allowed(self, node: Node, choices: Choices) -> list[Strategy]:
        """The strategies that ``node`` may take."""
        options = choices.strategies[node]
        return [options[n] for n in self.kept[node]] if node in self.kept else options

    def described(self) -> dict[Node, Hashable]:
        """What two ops must have in common to be planned as one."""
        return {n: (self.kept.get(n), n in self.used_as_kept) for n in (*self.kept,)}

    def keep(self, node: Node, choices: Choices, wanted: Keep) -> bool:
        """Leave ``node`` the strategies that are ``wanted``; False, and no change, if none is."""
        options = choices.strategies[node]
        before = self.kept.get(node, tuple(range(len(options))))
        left = tuple(n for n in before if wanted(options[n]))
        if left:
            self.kept[node] = left
        return bool(left)


def limits_of(policy: Policy, parameters: str, choices: Choices, config: ComputeConfig) -> Limits:
    """What ``policy`` forces, checked.

    Args:
        parameters: see :data:`~.policies.PARAMETERS`.
    Raises:
        PolicyError: nothing has a name that the policy names, or a split is not allowed over so
            many ranks.
        PartitionError: a split that the op's annotation does not allow over any.
    """
    name = getattr(policy, "__name__", "policy")
    chosen = policy(choices.ops, config)
    if not isinstance(chosen, Mapping):
        raise PolicyError(f"{name} must return a mapping from op names to splits, got {chosen!r}")
    limits, free = Limits(), set()
    for pattern, force in chosen.items():
        free |= _force(limits, choices, pattern, force, name, config)
    _limit_parameters(limits, choices, parameters, free)
    return limits


def _force(
    limits: Limits, choices: Choices, pattern: str, force: Force, name: str, config: ComputeConfig
) -> set[Node]:
    """Limit all that ``pattern`` names; returns the parameters among it."""
    stored = [n for n, path in choices.parameters.items() if fnmatch.fnmatchcase(path, pattern)]
    ops = [op for op in choices.ops if _called(pattern, op.name, op.module)]
    by_identifier = any(isinstance(x, str) and x not in ("whole", "any") for x in _each(force))
    if ops and (by_identifier or not stored):
        for op in ops:
            _force_op(limits, choices, op, force, name, config)
        return set()
    others = stored or [
        node
        for node in choices.strategies
        if node.op == "call_function"
        and record_of(node.target) is None
        and _called(pattern, node.name, module_of(node))
    ]
    if by_identifier or not others:
        names = ", ".join(op.name for op in choices.ops) or "none"
        raise PolicyError(f"the policy names {pattern}, but the annotated ops are: {names}")
    for node in others:
        if not limits.keep(node, choices, lambda s: _lies(s.outputs[0], force)):
            shown = dict.fromkeys(_shown(s.outputs[0]) for s in choices.strategies[node])
            raise PolicyError(
                f"policy {name!r}: {_title(node, choices)} cannot be cut on {force!r} over a mesh "
                f"of {choices.parts}; its result can lie: {'; '.join(shown)}"
            )
    return set(stored)


def _title(node: Node, choices: Choices) -> str:
    """What users call a node: a parameter's path, or its name and module."""
    if node in choices.parameters:
        return f"parameter {choices.parameters[node]}"
    return f"{node.name} in {module_of(node) or 'the module'}"


def _called(pattern: str, name: str, module: str) -> bool:
    return any(fnmatch.fnmatchcase(x, pattern) for x in (name, module) if x)


def _each(force: Force) -> tuple[str | int | None, ...]:
    return force if isinstance(force, tuple) else (force,)


def _force_op(
    limits: Limits,
    choices: Choices,
    op: OpSite,
    force: Force,
    name: str,
    config: ComputeConfig,
) -> None:
    node = next(n for n in choices.strategies if n.name == op.name)
    if limits.keep(node, choices, lambda s: _is_split(s.split, force)):
        return
    for wanted in _each(force):
        if isinstance(wanted, str) and wanted not in op.splits:
            _check_annotation(name, op, wanted, config)
            raise PolicyError(cannot(name, op, wanted, config))
    can = dict.fromkeys(str(s.split) for s in choices.strategies[node])
    raise PolicyError(
        f"policy {name!r}: {op.name} ({op.op} in {op.module or 'the module'}) cannot be split on "
        f"{force!r} over a mesh of {choices.parts}; it can on: {', '.join(can)}"
    )


def _is_split(split: Sequence[str | None], force: Force) -> bool:
    if isinstance(force, tuple):
        wanted = [None if x == "whole" else x for x in force]
        return len(wanted) == len(split) and all(
            w in ("any", s) for w, s in zip(wanted, split, strict=True)
        )
    if force in (None, "whole"):
        return not any(split)
    return force in split


def _lies(places: Places, force: Force) -> bool:
    dims = [p.dim if isinstance(p, Shard) else None for p in places]
    if isinstance(force, tuple):
        wanted = [None if x == "whole" else x for x in force]
        pairs = zip(wanted, dims, strict=False)
        return len(wanted) == len(dims) and all(w in ("any", d) for w, d in pairs)
    if force == "any":
        return True
    if force in (None, "whole"):
        return all(p.is_replicate() for p in places)
    return force in dims


def _shown(places: Places) -> str:
    return ", ".join(f"cut on {p.dim}" if isinstance(p, Shard) else "whole" for p in places)


def _limit_parameters(limits: Limits, choices: Choices, how: str, free: set[Node]) -> None:
    """Those that the policy did not name."""
    readers: dict[Node, list[tuple[Node, int]]] = {}
    for edge in choices.edges:
        if edge.producer in choices.parameters:
            readers.setdefault(edge.producer, []).append((edge.consumer, edge.slot))
    for node in choices.parameters:
        if node in free or how == "free":
            continue
        reads = readers.get(node, [])
        if how == "cut" and reads and all(_is_weight(*read) for read in reads):
            limits.used_as_kept.add(node)
            if not limits.keep(node, choices, lambda s: all(s.divided)):
                limits.keep(node, choices, lambda s: any(s.divided))
            continue
        limits.keep(node, choices, lambda s: not any(s.divided))
        if how == "read whole":
            for reader, slot in reads:
                limits.keep(reader, choices, lambda s, n=slot: _lies(s.inputs[n], None))  # type: ignore[misc]
                if _is_weight(reader, slot):
                    limits.keep(reader, choices, _are_tokens_cut(reader))


def _are_tokens_cut(reader: Node) -> Keep:
    """Whether a linear's input is cut on the last dim before its features, along every axis."""
    tokens = tensor_inputs(reader)[0].meta["val"].ndim - 2
    return lambda s: all(isinstance(p, Shard) and p.dim == tokens for p in s.inputs[0])


def _is_weight(reader: Node, slot: int) -> bool:
    return reader.target is torch.ops.aten.linear.default and slot == 1


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
