"""From a captured graph to a plan that all ranks share: found on one rank, checked on every."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from annotations.consistency import digest
from annotations.progress import stage
from annotations.registry import record_of

from ...config import ComputeConfig
from ..capture.call_inputs import Dims
from ..capture.capture import Captured, capture, capture_open
from ..capture.nodes import module_of
from ..capture.open_sizes import NotOpen
from ..capture.replaced_parameters import in_dtype
from ..permute.label_shift import whole_logits
from ..permute.model_shuffles import axis_of_shuffles, ordered, shuffles, without_shuffles
from ..permute.permuted_graph import SequencePermutation, permuted
from ..permute.sequence_permutation import permutations_on_mesh
from ..rates import Rates
from ..strategies.choices import find_choices
from ..strategies.op_strategies import Strategy
from ..strategies.placements import Placements
from .engine_cost import ADAM_BYTES, Budget, PlanCost
from .engine_plan import EnginePlan, Split, to_plain
from .limits import limits_of
from .plan_summary import graph_hash, make_report, sharded_parameters
from .planner import choose
from .policies import AnyPolicy, PolicyError, of_what_is_left
from .rank_agreement import compare, facts_of, from_rank_0
from .solver import PlanningError


@dataclass(frozen=True)
class Planned:
    """A plan, in a form that can be sent from rank to rank.

    Attributes:
        permutations: those that put the graph's sequences in another order, applied in turn.
        strategies: the strategy of each op of the permuted graph, by name.
        parameters: placements of sharded parameters, by their names in the module.
        shuffled: whether the graph keeps the model's own shuffles, see
            :mod:`..permute.model_shuffles`.
    """

    permutations: Sequence[SequencePermutation]
    strategies: Mapping[str, Strategy]
    parameters: Mapping[str, Placements]
    report: EnginePlan
    shuffled: bool = False

    def graph_of(self, captured: Captured) -> Captured:
        """The graph that the plan is for, made from the captured one."""
        if shuffles(captured):
            captured = ordered(captured) if self.shuffled else without_shuffles(captured)
        return functools.reduce(permuted, self.permutations, captured)

    def refuse_open_sizes(self, captured: Captured) -> None:
        """Raises NotOpen if the plan permutes tokens in an order of fixed length, or the graph
        drops elements: both depend on the total number of tokens."""
        if not all(each.of_any_length for each in self.permutations):
            raise NotOpen("the plan brings tokens in an order that is for one length")
        if captured.draws:
            raise NotOpen("elements are dropped at random")

    def noted(self, notes: Sequence[str]) -> Planned:
        """The same plan with these lines below its title."""
        return replace(self, report=replace(self.report, notes=tuple(notes)))


@dataclass(frozen=True, eq=False)
class Planning:
    """A graph and all that its plan depends on.

    Attributes:
        parameters: which of the graph's attributes are parameters, and the dtypes they are kept in.
        device: what the ranks compute on.
        kept: placements of parameters that are sharded already.
    """

    captured: Captured
    mesh: DeviceMesh
    policy: AnyPolicy
    config: ComputeConfig
    parameters: Mapping[str, torch.dtype]
    rates: Rates
    device: torch.device | str = "cpu"
    kept: Mapping[str, Placements] | None = None

    def plan(self) -> Planned:
        """Find the plan, without any communication.

        Raises:
            PartitionError: see :func:`~..permute.model_shuffles.ordered`.
        """
        captured, policy, own = self.captured, self.policy, shuffles(self.captured)
        if not own:
            return self._in_best_order(captured, policy)
        if isinstance(policy, EnginePlan) and policy.graph == self._identity:
            if any(node.name in policy.ops for node in own):
                return replace(self._in_best_order(ordered(captured), policy), shuffled=True)
            return self._in_best_order(without_shuffles(captured), policy)
        splits = dict(self._in_best_order(captured, policy).report.splits)
        axis = axis_of_shuffles(captured, splits)
        if axis is None:
            rest = without_shuffles(captured)
            left = _names(rest) | set(self.parameters)
            return self._in_best_order(rest, of_what_is_left(policy, _names(captured) - left, left))
        ndim = self.mesh.ndim
        along = to_plain(tuple("l" if n == axis else None for n in range(ndim)))
        splits |= {node.name: along for node in own}
        return replace(self._in_best_order(ordered(captured), policy, splits), shuffled=True)

    @functools.cached_property
    def _identity(self) -> str:
        return graph_hash(self.captured)

    def _in_best_order(
        self, captured: Captured, policy: AnyPolicy, splits: Mapping[str, Split] | None = None
    ) -> Planned:
        """The plan of a graph whose own order of tokens is known, in that order or in another.

        Args:
            splits: of annotated ops, if they are decided already.
        """
        policy, settings = self._policy_here(captured, policy), self.config.pas_config
        if isinstance(policy, EnginePlan):
            permutations, notes = self._permutations_of(policy, captured)
            return self._planned(captured, policy, permutations, {}).noted(notes)
        natural = self._planned(captured, policy, (), splits or {})
        splits, shape = natural.report.splits, tuple(self.mesh.shape)
        permutations, notes = permutations_on_mesh(captured, splits, shape, self.rates, settings)
        if not permutations:
            return natural.noted(notes)
        always = settings.get("hoist")
        try:
            other = self._planned(captured, policy, permutations, splits)
        except PlanningError:
            if always:
                raise
            return natural.noted(["kept natural order: another would need more memory"])
        slower = other.report.seconds > natural.report.seconds
        if policy == "auto" and slower and not always:
            return natural.noted(["kept natural order: another would make the whole step slower"])
        return other.noted(notes)

    def _permutations_of(
        self, plan: EnginePlan, captured: Captured
    ) -> tuple[list[SequencePermutation], list[str]]:
        """The permutations with which ``plan`` was made, and its notes: they give a graph that has
        all ops of the plan. Raises PolicyError if none do, or if the config asks for another order.
        """
        settings = self.config.pas_config
        wanted = settings.get("hoist", plan.hoisted)
        if wanted != plan.hoisted:
            has = "another" if plan.hoisted else "natural"
            raise PolicyError(f"pas_config['hoist']={wanted}, but the plan has {has} order")
        if not plan.hoisted:
            return [], list(plan.notes)
        at = plan.splits, plan.mesh_shape, self.rates
        # A plan of an older version does not say which ops run in another order.
        older = [(settings, None), ({"hoist": True}, None)]
        for given in [(settings, plan.in_order)] if plan.in_order else older:
            found, notes = permutations_on_mesh(captured, *at, *given)
            graph = functools.reduce(permuted, found, captured).graph
            if plan.ops.keys() <= {node.name for node in graph.nodes}:
                return found, notes
        raise PolicyError("the plan's sequences are in an order that its splits do not ask for")

    def _policy_here(self, captured: Captured, policy: AnyPolicy) -> AnyPolicy:
        """The policy; but only the splits of a plan that is for another mode, with other ops."""
        if not isinstance(policy, EnginePlan) or policy.graph == self._identity:
            return policy
        if self.kept is None:
            raise PolicyError("the plan is for another module, or for inputs of other shapes")
        here = {node.name for node in captured.graph.nodes}
        return {name: split for name, split in policy.splits.items() if name in here}

    def _planned(
        self,
        captured: Captured,
        policy: AnyPolicy,
        permutations: Sequence[SequencePermutation],
        splits: Mapping[str, Split],
    ) -> Planned:
        """The plan of the graph with its sequences in this order.

        Args:
            splits: of annotated ops, which must keep the splits that the order was chosen for.
        """
        graph = functools.reduce(permuted, permutations, captured)
        choices = find_choices(graph, self.mesh, self.parameters, self.config.num_scale_units)
        limits = limits_of(policy, choices, self.config)
        if self.kept is not None:
            limits.keep_parameters(self.kept)
        limits.keep_splits(splits)
        auto = policy == "auto"
        # A memory limit that the user did not set applies only to a policy that can adapt to it.
        budget = budget_of(self.config, self.device if auto else "cpu")
        # What other policies leave open is planned to move the fewest bytes, even in small models.
        rates = self.rates if auto else self.rates.by_bytes()
        with stage("solving for the plan"):
            chosen = choose(limits, PlanCost(choices, rates, budget), self.mesh)
        cost = PlanCost(choices, self.rates, budget)
        in_order = {str(each.order.length): sorted(each.ways) for each in permutations}
        report = make_report(cost, chosen, self._identity, in_order)
        strategies = {node.name: strategy for node, strategy in chosen.items()}
        return Planned(permutations, strategies, sharded_parameters(choices, chosen), report)


def _names(captured: Captured) -> set[str]:
    """The names by which a policy may refer to the ops of a graph."""
    names = set[str]()
    for node in captured.graph.nodes:
        record = record_of(node.target)
        names |= {node.name, module_of(node), record.title if record is not None else ""}
    return names


def captured_in(
    dtype: torch.dtype | None,
    module: torch.nn.Module,
    example: Mapping[str, Any],
    mode: FakeTensorMode | None,
) -> Captured:
    """The graph of a module that computes in ``dtype``; None means the dtype of its parameters."""
    with stage("capturing the graph"), in_dtype(module, dtype):
        captured = capture(module, example, mode)
        whole_logits(captured.graph)
    return captured


def captured_open(
    dtype: torch.dtype | None,
    module: torch.nn.Module,
    example: Mapping[str, Any],
    dims: Dims,
    ranks: int,
) -> Captured:
    """:func:`captured_in` with these sizes left open: as multiples of the number of ranks, unless
    torch.export refuses that because the model has conditions of its own."""
    with stage("capturing the graph"), in_dtype(module, dtype):
        try:
            captured = capture_open(module, example, dims, ranks)
        except torch._dynamo.exc.UserError:
            captured = capture_open(module, example, dims)
        whole_logits(captured.graph)
    return captured


def budget_of(config: ComputeConfig, device: torch.device | str) -> Budget:
    """What ``pas_config`` says a rank may hold; by default, on CUDA, all memory of its device."""
    limit = config.pas_config.get("memory_bytes")
    if limit is None and torch.device(device).type == "cuda" and torch.cuda.is_available():
        limit = torch.cuda.get_device_properties(device).total_memory
    optimizer = config.pas_config.get("optimizer_bytes_per_parameter", ADAM_BYTES)
    for name, value in (("memory_bytes", limit), ("optimizer_bytes_per_parameter", optimizer)):
        if value is not None and not (isinstance(value, int | float) and value >= 0):
            raise ValueError(
                f"ComputeConfig: pas_config[{name!r}]={value!r} must be a number of bytes"
            )
    return Budget(limit, optimizer)


def shared_plan(planning: Planning, group: Any = None) -> Planned:
    """The plan, found on the first rank of ``group`` (None: all ranks) and sent to the others; all
    of them call this. What planning raises, every rank raises. Raises CaptureError if ranks
    captured different graphs, or different values of constants."""
    captured = planning.captured
    facts = {"graph": graph_hash(captured), **facts_of(dict(captured.constants), digest)}
    compare("captured graphs", facts, group)
    return from_rank_0(planning.plan, group)
