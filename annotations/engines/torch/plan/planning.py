"""From a captured graph to a plan that all ranks share: found on one rank, checked on every."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from annotations.consistency import digest
from annotations.progress import stage

from ...config import ComputeConfig
from ..capture.capture import Captured, capture
from ..module.parameters import in_dtype
from ..module.rank_agreement import compare, facts_of
from ..permute.label_shift import whole_logits
from ..permute.model_shuffles import axis_of_shuffles, ordered, shuffles, without_shuffles
from ..permute.permuted_graph import SequencePermutation, permuted
from ..permute.sequence_permutation import permutations_of, permutations_on_mesh
from ..report.engine_plan import EnginePlan, Split, to_plain
from ..report.plan_summary import cut, graph_hash, make_report
from ..strategies.choices import find_choices
from ..strategies.op_strategies import Strategy
from ..strategies.placements import Placements
from .engine_cost import ADAM_BYTES, Budget, PlanCost, Rates
from .limits import as_plan, limits_of, limits_of_plan
from .planner import choose
from .policies import Force, Policy, PolicyError, is_path, named
from .solver import PlanningError

AnyPolicy = str | EnginePlan | Policy | Mapping[str, Force]


@dataclass(frozen=True)
class Planned:
    """A plan, in terms that go from rank to rank.

    Attributes:
        permutations: what puts the graph's sequences in another order, one after the other.
        strategies: of each op, by its name in the graph, thereafter.
        parameters: placements of those that are kept in parts, by their names in the module.
        shuffled: whether the model's own shuffles are in it, see :mod:`..permute.model_shuffles`.
    """

    permutations: Sequence[SequencePermutation]
    strategies: Mapping[str, Strategy]
    parameters: Mapping[str, Placements]
    report: EnginePlan
    shuffled: bool = False

    def graph_of(self, captured: Captured) -> Captured:
        """The graph that the plan is of."""
        if shuffles(captured):
            captured = ordered(captured) if self.shuffled else without_shuffles(captured)
        return functools.reduce(permuted, self.permutations, captured)

    def noted(self, notes: Sequence[str]) -> Planned:
        """The same with these lines below the plan's title."""
        return replace(self, report=replace(self.report, notes=tuple(notes)))


@dataclass(frozen=True, eq=False)
class Planning:
    """A graph and all that its plan depends on.

    Attributes:
        parameters: which of the graph's attributes are parameters, and the dtypes they are kept in.
        device: what the ranks compute on.
        kept: placements of parameters that are kept in parts already.
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
        """Find the plan; communicates nothing.

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
            # Of what the policy decides, all but the shuffles.
            for node in own:
                splits.pop(node.name, None)
            policy = policy if isinstance(policy, str) else splits
            return self._in_best_order(without_shuffles(captured), policy)
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
        """The plan of a graph of which the order of tokens is known.

        Args:
            splits: of annotated ops, where they are decided.
        """
        policy, settings = self._policy_here(captured, policy), self.config.pas_config
        if isinstance(policy, EnginePlan):
            permutations, notes = permutations_of(policy, captured, self.rates, settings)
            return self._planned(captured, policy, permutations, {}).noted(notes)
        natural = self._planned(captured, policy, (), splits or {})
        splits, shape = natural.report.splits, tuple(self.mesh.shape)
        permutations, notes = permutations_on_mesh(captured, splits, shape, self.rates, settings)
        if not permutations:
            return natural.noted(notes)
        always = settings.get("hoist")
        try:
            permuted = self._planned(captured, policy, permutations, splits)
        except PlanningError:
            if always:
                raise
            return natural.noted(["kept natural order: another would need more memory"])
        slower = permuted.report.seconds > natural.report.seconds
        if policy == "auto" and slower and not always:
            return natural.noted(["kept natural order: another would make the whole step slower"])
        return permuted.noted(notes)

    def _policy_here(self, captured: Captured, policy: AnyPolicy) -> AnyPolicy:
        """The policy; of a plan for another mode of the module, with other ops, its splits."""
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
        """The plan of the graph in this order of its sequences.

        Args:
            splits: of the annotated ops, which keep those that the order was chosen for.
        """
        graph = functools.reduce(permuted, permutations, captured)
        choices = find_choices(graph, self.mesh, self.parameters, self.config.num_scale_units)
        if isinstance(policy, EnginePlan):
            limits = limits_of_plan(policy, choices)
        else:
            limits = limits_of(*named(policy), choices, self.config)
        if self.kept is not None:
            limits.keep_parameters(self.kept)
        limits.keep_splits(splits)
        auto = policy == "auto"
        # Memory that nobody named limits only a plan that can do something about it.
        budget = budget_of(self.config, self.device if auto else "cpu")
        # What a policy leaves open is planned so that the fewest bytes move, small as the model is.
        rates = self.rates if auto else self.rates.by_bytes()
        with stage("solving for the plan"):
            chosen = choose(limits, PlanCost(choices, rates, budget), self.mesh)
        cost = PlanCost(choices, self.rates, budget)
        report = make_report(cost, chosen, self._identity, bool(permutations))
        strategies = {node.name: strategy for node, strategy in chosen.items()}
        return Planned(permutations, strategies, cut(choices, chosen), report)


def captured_in(
    dtype: torch.dtype | None,
    module: torch.nn.Module,
    example: Mapping[str, Any],
    mode: FakeTensorMode | None,
) -> Captured:
    """The graph of a module that computes in ``dtype``; None is that of its parameters."""
    with stage("capturing the graph"), in_dtype(module, dtype):
        captured = capture(module, example, mode)
        whole_logits(captured.graph)
    return captured


def budget_of(config: ComputeConfig, device: torch.device | str) -> Budget:
    """What ``pas_config`` says a rank may hold; by default all of its device on CUDA."""
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
    """The plan, found on the first rank of ``group`` (None: of all) for the others, which all call
    this. What planning raises, every rank raises; CaptureError where ranks captured different
    graphs, or other values of constants."""
    captured = planning.captured
    facts = {"graph": graph_hash(captured), **facts_of(dict(captured.constants), digest)}
    compare("captured graphs", facts, group)
    return _on_rank_0(planning.plan, group)


def shared_policy(policy: AnyPolicy) -> AnyPolicy:
    """``policy``, or the plan in a file that it names, which rank 0 reads for all ranks; where that
    fails, every rank raises."""
    return _on_rank_0(lambda: as_plan(policy)) if is_path(policy) else policy


def _on_rank_0(make: Callable[[], Any], group: Any = None) -> Any:
    """What the first rank makes, or the error that it raises, on every rank."""
    made: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            made = [make()]
        except Exception as error:  # the other ranks would wait for ever
            made = [error]
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:  # a user's, of which only the text can be sent
                made = [RuntimeError(f"{type(error).__name__}: {error}")]
    dist.broadcast_object_list(made, group=group, group_src=0)
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]
