"""What a policy leaves to the planner: for each op the strategies that it may still take."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import Shard
from torch.fx import Node

from annotations.errors import PartitionError
from annotations.registry import record_of

from ...config import ComputeConfig
from ..capture.nodes import tensor_inputs
from ..strategies.choices import Choices
from ..strategies.op_strategies import Strategy
from ..strategies.placements import Places
from .policies import Force, OpSite, Policy, PolicyError, cannot
from .repeats import module_of

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
    forcing = _Forcing(name, choices, config)
    for pattern, force in chosen.items():
        forcing.apply(pattern, force)
    forcing.limit_parameters(parameters)
    return forcing.limits


@dataclass
class _Forcing:
    """What the policy of a name forces.

    Attributes:
        named: the parameters that the policy has named so far.
    """

    name: str
    choices: Choices
    config: ComputeConfig
    limits: Limits = field(default_factory=Limits)
    named: set[Node] = field(default_factory=set)

    def apply(self, pattern: str, force: Force) -> None:
        """Limit all that ``pattern`` names."""
        choices = self.choices
        parameters = [n for n, p in choices.parameters.items() if fnmatch.fnmatchcase(p, pattern)]
        ops = [op for op in choices.ops if _is_called(pattern, op.name, op.module)]
        each = force if isinstance(force, tuple) else (force,)
        by_identifier = any(isinstance(x, str) and x not in ("whole", "any") for x in each)
        if ops and (by_identifier or not parameters):
            for op in ops:
                self._force_op(op, force)
            return
        others = parameters or [
            node
            for node in choices.strategies
            if node.op == "call_function"
            and record_of(node.target) is None
            and _is_called(pattern, node.name, module_of(node))
        ]
        if by_identifier or not others:
            names = ", ".join(op.name for op in choices.ops) or "none"
            raise PolicyError(f"the policy names {pattern}, but the annotated ops are: {names}")
        for node in others:
            if not self.limits.keep(node, choices, lambda s: _is_placed(s.outputs[0], force)):
                title = f"{node.name} in {module_of(node) or 'the module'}"
                if node in choices.parameters:
                    title = f"parameter {choices.parameters[node]}"
                can = dict.fromkeys(_shown(s.outputs[0]) for s in choices.strategies[node])
                raise PolicyError(
                    f"policy {self.name!r}: {title} cannot be cut on {force!r} over a mesh of "
                    f"{choices.parts}; its result can be: {'; '.join(can)}"
                )
        self.named.update(parameters)

    def _force_op(self, op: OpSite, force: Force) -> None:
        choices = self.choices
        node = next(n for n in choices.strategies if n.name == op.name)
        if self.limits.keep(node, choices, lambda s: _fits(force, s.split)):
            return
        for wanted in force if isinstance(force, tuple) else (force,):
            if isinstance(wanted, str) and wanted not in op.splits:
                _check_annotation(self.name, op, wanted, self.config)
                raise PolicyError(cannot(self.name, op, wanted, self.config))
        can = dict.fromkeys(str(s.split) for s in choices.strategies[node])
        raise PolicyError(
            f"policy {self.name!r}: {op.name} ({op.op} in {op.module or 'the module'}) cannot be "
            f"split on {force!r} over a mesh of {choices.parts}; it can on: {', '.join(can)}"
        )

    def limit_parameters(self, how: str) -> None:
        """Limit the parameters that the policy did not name."""
        choices, keep = self.choices, self.limits.keep
        readers: dict[Node, list[tuple[Node, int]]] = {}
        for edge in choices.edges:
            if edge.producer in choices.parameters:
                readers.setdefault(edge.producer, []).append((edge.consumer, edge.slot))
        for node in choices.parameters:
            if node in self.named or how == "free":
                continue
            reads = readers.get(node, [])
            if how == "cut" and reads and all(_is_weight(*read) for read in reads):
                self.limits.used_as_kept.add(node)
                if not keep(node, choices, lambda s: all(s.divided)):
                    keep(node, choices, lambda s: any(s.divided))
                continue
            keep(node, choices, lambda s: not any(s.divided))
            if how == "read whole":
                for reader, slot in reads:
                    keep(reader, choices, lambda s, n=slot: _is_placed(s.inputs[n], None))  # type: ignore[misc]
                    if _is_weight(reader, slot):
                        keep(reader, choices, _are_tokens_cut(reader))


def _is_called(pattern: str, name: str, module: str) -> bool:
    return any(fnmatch.fnmatchcase(x, pattern) for x in (name, module) if x)


def _fits(force: Force, axes: Sequence[str | int | None]) -> bool:
    """Whether what is cut along each axis, None for nothing, is as forced."""
    if isinstance(force, tuple):
        wanted = [None if x == "whole" else x for x in force]
        return len(wanted) == len(axes) and all(
            w in ("any", a) for w, a in zip(wanted, axes, strict=True)
        )
    return not any(a is not None for a in axes) if force in (None, "whole") else force in axes


def _is_placed(places: Places, force: Force) -> bool:
    if force in (None, "whole"):
        return all(p.is_replicate() for p in places)
    return force == "any" or _fits(force, [p.dim if isinstance(p, Shard) else None for p in places])


def _shown(places: Places) -> str:
    return ", ".join(f"cut on {p.dim}" if isinstance(p, Shard) else "whole" for p in places)


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
