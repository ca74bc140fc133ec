"""What the planner may still choose: the strategies that a policy, or an earlier plan, leaves to
each op."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import Placement, Shard
from torch.fx import Node

from annotations.errors import PartitionError
from annotations.registry import record_of

from ...config import ComputeConfig
from ..capture.nodes import module_of, tensor_inputs
from ..strategies.choices import Choices, OpSite
from ..strategies.op_strategies import Strategy
from ..strategies.placements import Placements
from .engine_plan import EnginePlan, OpPlacements, Split, each_axis, placements_text
from .plan_summary import in_any_layer, table_name
from .policies import AnyPolicy, Force, PolicyError, cannot, named

Keep = Callable[[Strategy], bool]


@dataclass
class Limits:
    """The strategies that ops may take.

    Attributes:
        kept: for each op that is limited, the indices of the strategies that it may take.
        used_as_kept: parameters that ops must read with the placements in which they are kept.
    """

    choices: Choices
    kept: dict[Node, tuple[int, ...]] = field(default_factory=dict)
    used_as_kept: set[Node] = field(default_factory=set)

    def allowed(self, node: Node) -> list[Strategy]:
        """The strategies that ``node`` may take."""
        options = self.choices.strategies[node]
        return [options[n] for n in self.kept[node]] if node in self.kept else options

    def described(self) -> dict[Node, Hashable]:
        """What two ops must have in common to be planned as one."""
        return {node: (kept, node in self.used_as_kept) for node, kept in self.kept.items()}

    def keep(self, node: Node, wanted: Keep) -> bool:
        """Limit ``node`` to ``wanted`` strategies; False, and no change, if there are none."""
        options = self.choices.strategies[node]
        left = tuple(n for n in self.kept.get(node, range(len(options))) if wanted(options[n]))
        if left:
            self.kept[node] = left
        return bool(left)

    def keep_split(self, node: Node, split: Split) -> bool:
        """Limit an annotated op to the strategies with this split."""
        axes = each_axis(split)
        return self.keep(node, lambda strategy: strategy.split == axes)

    def keep_splits(self, splits: Mapping[str, Split]) -> None:
        """Split annotated ops, given by name, as in another plan of the graph."""
        for node in self.choices.strategies:
            found = node.name not in splits or self.keep_split(node, splits[node.name])
            assert found, f"{node.name} cannot be split as it was"

    def keep_parameters(self, kept: Mapping[str, Placements]) -> None:
        """Parameters keep their placements, whatever else is planned anew."""
        for node, name in self.choices.parameters.items():
            self.kept.pop(node, None)
            self.used_as_kept.discard(node)
            placements = kept.get(name, self.choices.strategies[node][0].outputs[0])
            found = self.keep(node, lambda s, placements=placements: s.outputs[0] == placements)  # type: ignore[misc]
            assert found, f"{name} is kept as no strategy has it"


def limits_of(policy: AnyPolicy, choices: Choices, config: ComputeConfig) -> Limits:
    """Check ``policy``, and return what it leaves to choose.

    Raises:
        PolicyError: nothing has a name that the policy uses, or a split is not allowed over so
            many ranks.
        PartitionError: the op's annotation does not allow a split over any number of ranks.
    """
    if isinstance(policy, EnginePlan):
        return _limits_of_plan(policy, choices)
    force, parameters = named(policy)
    name = getattr(force, "__name__", "policy")
    chosen = force(choices.ops, config)
    if not isinstance(chosen, Mapping):
        raise PolicyError(f"{name} must return a mapping from op names to splits, got {chosen!r}")
    forcing, named_parameters = _Forcing(Limits(choices), name, config), set[Node]()
    for pattern, wanted in chosen.items():
        named_parameters.update(forcing.all_called(pattern, wanted))
    if parameters != "free":
        _limit_parameters(forcing.limits, parameters, named_parameters)
    return forcing.limits


@dataclass(frozen=True)
class _Forcing:
    """Applies to ``limits`` what the policy of this name forces."""

    limits: Limits
    policy: str
    config: ComputeConfig

    def all_called(self, pattern: str, force: Force) -> list[Node]:
        """Limit all that ``pattern`` names; return the parameters among it."""
        choices = self.limits.choices
        named = choices.parameters.items()
        parameters = [node for node, path in named if fnmatch.fnmatchcase(path, pattern)]
        ops = [op for op in choices.ops if _is_called(pattern, op.name, op.module)]
        words = {x for x in each_axis(force) if isinstance(x, str)}
        by_identifier = bool(words - {"whole", "any"})
        if ops and (by_identifier or not parameters):
            for op in ops:
                self._annotated(op, force)
            return []
        others = parameters or self._without_annotation(pattern)
        if others and not by_identifier:
            for node in others:
                self._other(node, force)
            return parameters
        # Nothing else has the name: it may be one from the plan's table.
        ops = [op for op in choices.ops if fnmatch.fnmatchcase(op.op, pattern)]
        for op in ops:
            self._annotated(op, force)
        if not ops:
            raise PolicyError(self._no_such_name(pattern, by_identifier))
        return []

    def _without_annotation(self, pattern: str) -> list[Node]:
        others = self._others()
        return [n for n in others if _is_called(pattern, n.name, module_of(n))] or [
            n for n in others if fnmatch.fnmatchcase(table_name(n, self.limits.choices), pattern)
        ]

    def _others(self) -> list[Node]:
        nodes = self.limits.choices.strategies
        return [n for n in nodes if n.op == "call_function" and record_of(n.target) is None]

    def _no_such_name(self, pattern: str, by_identifier: bool) -> str:
        """The error text for a name that fits nothing: lists the names that would fit."""
        choices = self.limits.choices
        modules = [in_any_layer(f"{op.module}.")[:-1] for op in choices.ops if op.module]
        fit = {"their functions": [op.op for op in choices.ops], "their modules": modules}
        if not by_identifier:
            fit["other ops"] = [in_any_layer(table_name(n, choices)) for n in self._others()]
            fit["parameters"] = list(map(in_any_layer, choices.parameters.values()))
        ops = ", ".join(op.name for op in choices.ops) or "none"
        text = f"the policy names {pattern}, but the annotated ops are: {ops}"
        listed = {kind: ", ".join(dict.fromkeys(names)) for kind, names in fit.items() if names}
        return text + "".join(f"; {kind}: {names}" for kind, names in listed.items())

    def _annotated(self, op: OpSite, force: Force) -> None:
        choices = self.limits.choices
        node = next(n for n in choices.strategies if n.name == op.name)
        if self.limits.keep(node, lambda s: _fits(force, s.split)):
            return
        for wanted in each_axis(force):
            if isinstance(wanted, str) and wanted not in op.splits:
                self._check_annotation(op, wanted)
                raise PolicyError(cannot(self.policy, op, wanted, self.config))
        raise PolicyError(
            f"policy {self.policy!r}: {op.title} cannot be split on {force!r} over a mesh of "
            f"{choices.parts}; it can on: {_splits(choices.strategies[node])}"
        )

    def _check_annotation(self, op: OpSite, split: str) -> None:
        """Raises PartitionError where the annotation does not allow a split over any ranks."""
        if any(split == allowed.identifier for bound in op.bindings for allowed in bound.splits()):
            return
        try:
            op.bindings[0].split(split)
        except PartitionError as error:
            # The annotation's own list knows neither sizes nor alternatives.
            details = [line for line in error.details if not line.startswith("can be split")]
            can = ", ".join(map(repr, op.splits)) or "nothing"
            where = f"{op.name} in {op.module or 'the module'}"
            details += [
                f"can be split over {self.config.plan_ngpus} ranks: {can}",
                f"asked for by policy {self.policy!r} for {where}",
            ]
            raise PartitionError(error.problem, error.text, error.span, details, error.op) from None

    def _other(self, node: Node, force: Force) -> None:
        """Limit a parameter, or an op without annotation."""
        choices = self.limits.choices
        if self.limits.keep(node, lambda s: _is_placed(s.outputs[0], force)):
            return
        title = f"{node.name} in {module_of(node) or 'the module'}"
        if node in choices.parameters:
            title = f"parameter {choices.parameters[node]}"
        placed = (map(_dim, s.outputs[0]) for s in choices.strategies[node])
        words = (("whole" if d is None else f"cut on {d}" for d in dims) for dims in placed)
        can = dict.fromkeys(map(", ".join, words))
        raise PolicyError(
            f"policy {self.policy!r}: {title} cannot be cut on {force!r} over a mesh of "
            f"{choices.parts}; its result can be: {'; '.join(can)}"
        )


def _limit_parameters(limits: Limits, how: str, forced: set[Node]) -> None:
    """Limit the parameters that the policy did not name."""
    reads: dict[Node, list[tuple[Node, int]]] = {n: [] for n in limits.choices.parameters}
    for edge in limits.choices.edges:
        if edge.producer in reads:
            reads[edge.producer].append((edge.consumer, edge.slot))
    for node, readers in reads.items():
        if node in forced:
            continue
        if how == "cut" and readers and all(_is_weight(*read) for read in readers):
            limits.used_as_kept.add(node)
            if not limits.keep(node, lambda s: all(s.divided)):
                limits.keep(node, lambda s: any(s.divided))
            continue
        limits.keep(node, lambda s: not any(s.divided))
        for reader, slot in readers if how == "read whole" else ():
            limits.keep(reader, lambda s, n=slot: _is_placed(s.inputs[n], None))  # type: ignore[misc]
            if _is_weight(reader, slot):  # the linear's tokens are then cut along every axis
                last = tensor_inputs(reader)[0].meta["val"].ndim - 2
                limits.keep(reader, lambda s, n=last: {*map(_dim, s.inputs[0])} == {n})  # type: ignore[misc]


def _is_called(pattern: str, name: str, module: str) -> bool:
    return any(fnmatch.fnmatchcase(x, pattern) for x in (name, module) if x)


def _fits(force: Force, axes: Sequence[str | int | None]) -> bool:
    """Whether ``axes``, what is cut along each mesh axis (None: nothing), is as forced."""
    if isinstance(force, tuple):
        wanted = [None if x == "whole" else x for x in force]
        return len(wanted) == len(axes) and all(
            w in ("any", a) for w, a in zip(wanted, axes, strict=True)
        )
    return not any(a is not None for a in axes) if force in (None, "whole") else force in axes


def _is_placed(placements: Placements, force: Force) -> bool:
    if force in (None, "whole"):
        return all(p.is_replicate() for p in placements)
    return force == "any" or _fits(force, list(map(_dim, placements)))


def _dim(placement: Placement) -> int | None:
    return placement.dim if isinstance(placement, Shard) else None


def _is_weight(reader: Node, slot: int) -> bool:
    return reader.target is torch.ops.aten.linear.default and slot == 1


def _limits_of_plan(plan: EnginePlan, choices: Choices) -> Limits:
    """Limit each op and parameter to what the plan says. Ops that it leaves out stay open, and
    parameters are whole. Raises PolicyError if the plan is for another module, other shapes or
    another mesh, or has been edited to something that an op does not allow."""
    if plan.mesh_shape != choices.parts:
        raise PolicyError(f"the plan is for a mesh of {plan.mesh_shape}, not of {choices.parts}")
    limits = Limits(choices)
    by_name = {node.name: node for node in choices.strategies}
    for verb, names in (("splits", plan.splits), ("names", plan.ops)):
        if strange := next((name for name in names if name not in by_name), None):
            raise PolicyError(f"the plan {verb} {strange}, which is no op of the graph")
    for name, split in plan.splits.items():
        wanted = each_axis(split)
        if name in plan.ops and plan.ops[name].split != wanted:
            raise PolicyError(
                f"the plan's splits have {name} on {wanted}, and its ops on "
                f"{plan.ops[name].split}; change both, or leave it out of the ops"
            )
        if not limits.keep_split(by_name[name], split):
            can = _splits(choices.strategies[by_name[name]])
            raise PolicyError(
                f"the plan splits {name} on {wanted}, but it can only be split on {can}"
            )
    for name, placed in plan.ops.items():
        if not limits.keep(by_name[name], lambda s, p=placed: OpPlacements.of(s) == p):  # type: ignore[misc]
            can = "\n    ".join(dict.fromkeys(map(_shown, choices.strategies[by_name[name]])))
            raise PolicyError(f"the plan has {name} as {placed}, but it can only be\n    {can}")
    whole = ",".join("R" for _ in choices.parts)
    for node, path in choices.parameters.items():
        kept = plan.parameters.get(path, whole)
        if not limits.keep(node, lambda s, k=kept: placements_text(s.outputs[0]) == k):  # type: ignore[misc]
            raise PolicyError(f"the plan keeps {path} as {kept!r}, which it cannot be")
    return limits


def _splits(strategies: Sequence[Strategy]) -> str:
    return ", ".join(dict.fromkeys(str(s.split) for s in strategies))


def _shown(strategy: Strategy) -> str:
    placed = OpPlacements.of(strategy)
    split = f" (split {', '.join(name or '-' for name in placed.split)})"
    moved = f"{' '.join(placed.inputs)} -> {' '.join(placed.outputs)}"
    return moved + split if any(placed.split) else moved
