"""From a captured graph to a plan that all ranks share: found on one rank, checked on every."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...config import ComputeConfig
from ..capture.capture import Captured
from ..module.rank_agreement import same_graph
from ..permute.model_shuffles import (
    axis_of_shuffles,
    ordered,
    shuffles,
    without_shuffles,
)
from ..permute.permuted_graph import SequencePermutation, reordered
from ..permute.sequence_permutation import hoisted, hoisted_as
from ..report.engine_plan import EnginePlan
from ..report.plan_summary import cut, graph_hash, make_report
from ..strategies.choices import Choices, find_choices
from ..strategies.op_strategies import Strategy
from ..strategies.placements import Places
from .engine_cost import Rates
from .limits import Limits, limits_of
from .memory import ADAM_BYTES, Budget
from .planner import choose
from .policies import Force, Policy, PolicyError, named
from .saved_plan import as_plan, is_path, limits_of_plan
from .solver import PlanningError

AnyPolicy = str | EnginePlan | Policy | Mapping[str, Force]

_meshes: dict[Any, tuple[Any, DeviceMesh]] = {}


@dataclass(frozen=True)
class Planned:
    """A plan, in terms that go from rank to rank.

    Attributes:
        shuffled: whether the model's own shuffles are in the graph, see
            :mod:`..permute.model_shuffles`.
        hoistings: what puts the graph's sequences in another order, one after the other.
        strategies: of each op, by its name in the graph, thereafter.
        parameters: how those lie that are kept in parts, by their names in the module.
    """

    hoistings: Sequence[SequencePermutation]
    strategies: Mapping[str, Strategy]
    parameters: Mapping[str, Places]
    report: EnginePlan
    shuffled: bool = False

    def graph_of(self, captured: Captured) -> Captured:
        """The graph that the plan is of."""
        if shuffles(captured):
            captured = ordered(captured) if self.shuffled else without_shuffles(captured)
        return functools.reduce(reordered, self.hoistings, captured)


def shaped(mesh: DeviceMesh, config: ComputeConfig) -> DeviceMesh:
    """The ranks of a copy as ``config.mesh_shape`` says; every rank of the run calls this."""
    shape = config.mesh_shape
    if len(shape) == 1:
        return mesh
    key = mesh.device_type, config.num_scale_units, shape
    world = dist.group.WORLD
    if key not in _meshes or _meshes[key][0] is not world:
        axes = tuple(f"axis{n}" for n in range(len(shape)))
        whole = init_device_mesh(
            mesh.device_type, (config.num_scale_units, *shape), mesh_dim_names=("copy", *axes)
        )
        _meshes[key] = world, whole[axes]
    return _meshes[key][1]


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


def plan_graph(
    captured: Captured,
    mesh: DeviceMesh,
    policy: AnyPolicy,
    config: ComputeConfig,
    parameters: Mapping[str, torch.dtype],
    rates: Rates,
    device: torch.device | str = "cpu",
    kept: Mapping[str, Places] | None = None,
) -> Planned:
    """Find the plan of a graph; communicates nothing.

    Args:
        parameters: which of the graph's attributes are parameters, and the dtypes they are kept in.
        device: what the ranks compute on.
        kept: how parameters lie already that are kept in parts.
    Raises:
        PartitionError: see :func:`~..permute.model_shuffles.ordered`.
    """
    plan = functools.partial(
        _plan,
        mesh=mesh,
        config=config,
        parameters=parameters,
        rates=rates,
        device=device,
        kept=kept,
        identity=graph_hash(captured),
    )
    own = shuffles(captured)
    if not own:
        return plan(captured, policy)
    if isinstance(policy, EnginePlan) and policy.graph == graph_hash(captured):
        if any(node.name in policy.ops for node in own):
            return replace(plan(ordered(captured), policy), shuffled=True)
        return plan(without_shuffles(captured), policy)
    splits = plan(captured, policy).report.splits
    axis = axis_of_shuffles(captured, splits)
    if axis is None:
        # Of what the policy decides, all but the shuffles.
        left = {n: s for n, s in splits.items() if n not in {node.name for node in own}}
        return plan(without_shuffles(captured), policy if isinstance(policy, str) else left)
    for node in own:
        each = ["l" if n == axis else None for n in range(mesh.ndim)]
        splits = {**splits, node.name: each[0] if mesh.ndim == 1 else tuple(each)}
    return replace(plan(ordered(captured), policy, splits=splits), shuffled=True)


def _plan(
    captured: Captured,
    policy: AnyPolicy,
    mesh: DeviceMesh,
    config: ComputeConfig,
    parameters: Mapping[str, torch.dtype],
    rates: Rates,
    device: torch.device | str,
    kept: Mapping[str, Places] | None,
    identity: str,
    splits: Mapping[str, Any] | None = None,
) -> Planned:
    """:func:`plan_graph` of a graph of which the order of tokens is known.

    Args:
        identity: the hash of the graph that was captured.
        splits: of annotated ops, where they are decided.
    """
    given = splits or {}

    def planned(hoistings: Sequence[SequencePermutation], splits: Mapping[str, Any]) -> Planned:
        graph = functools.reduce(reordered, hoistings, captured)
        choices = find_choices(graph, mesh, parameters, config.num_scale_units)
        limits = _limits(policy, choices, config)
        if kept is not None:
            _keep(limits, choices, kept)
        _split_so(limits, choices, splits)
        found = _cheapest(choices, limits, policy, config, rates, device, mesh)
        report = replace(found.report, graph=identity, hoisted=bool(hoistings))
        return replace(found, hoistings=hoistings, report=report)

    if isinstance(policy, EnginePlan) and policy.graph != identity:
        if kept is None:
            raise PolicyError("the plan is for another module, or for inputs of other shapes")
        # Another mode of the module, with other ops: those that are annotated are split as before.
        here = {node.name for node in captured.graph.nodes}
        policy = {name: split for name, split in policy.splits.items() if name in here}
    if isinstance(policy, EnginePlan):
        hoistings, notes = hoisted_as(policy, captured, rates, config.pas_config)
        return _noted(planned(hoistings, {}), notes)
    found = planned((), given)
    splits = found.report.splits
    hoistings, notes = hoisted(captured, splits, tuple(mesh.shape), rates, config.pas_config)
    if hoistings:
        always = config.pas_config.get("hoist")
        try:
            other = planned(hoistings, splits)
        except PlanningError:
            if always:
                raise
            return _noted(found, ["kept natural order: another would need more memory"])
        if policy != "auto" or always or other.report.seconds <= found.report.seconds:
            return _noted(other, notes)
        notes = ["kept natural order: another would make the whole step slower"]
    return _noted(found, notes)


def _cheapest(
    choices: Choices,
    limits: Limits,
    policy: AnyPolicy,
    config: ComputeConfig,
    rates: Rates,
    device: torch.device | str,
    mesh: DeviceMesh,
) -> Planned:
    # Memory that nobody named limits only a plan that can do something about it.
    budget = budget_of(config, device if policy == "auto" else "cpu")
    # What a policy leaves open is planned so that the fewest bytes move, small as the model may be.
    chosen = choose(choices, limits, rates if policy == "auto" else rates.by_bytes(), budget, mesh)
    report = make_report(choices, chosen, rates, budget)
    stored = {choices.parameters[n]: s.outputs[0] for n, s in cut(choices, chosen).items()}
    return Planned((), {node.name: s for node, s in chosen.items()}, stored, report)


def _noted(planned: Planned, notes: Sequence[str]) -> Planned:
    return replace(planned, report=replace(planned.report, notes=tuple(notes)))


def _split_so(limits: Limits, choices: Choices, splits: Mapping[str, Any]) -> None:
    """Annotated ops stay split as they were when an order was chosen for them."""
    for node in choices.strategies:
        if node.name in splits:
            wanted = splits[node.name]
            each = wanted if isinstance(wanted, tuple) else (wanted,)
            found = limits.keep(node, choices, lambda s, w=each: s.split == w)  # type: ignore[misc]
            assert found, f"{node.name} cannot be split as it was"


def _limits(policy: AnyPolicy, choices: Choices, config: ComputeConfig) -> Limits:
    if isinstance(policy, EnginePlan):
        return limits_of_plan(policy, choices)
    return limits_of(*named(policy), choices, config)


def _keep(limits: Limits, choices: Choices, kept: Mapping[str, Places]) -> None:
    """Parameters stay as they lie, whatever else is planned anew."""
    for node, name in choices.parameters.items():
        whole = choices.strategies[node][0].outputs[0]
        limits.kept.pop(node, None)
        limits.used_as_kept.discard(node)
        wanted = kept.get(name, whole)
        found = limits.keep(node, choices, lambda s, w=wanted: s.outputs[0] == w)  # type: ignore[misc]
        assert found, f"{name} lies as no strategy has it"


def shared_plan(captured: Captured, **given: Any) -> Planned:
    """:func:`plan_graph` on rank 0, for all ranks; every rank calls this.

    Raises:
        Exception: what planning raised, on every rank alike.
        CaptureError: ranks captured different graphs.
    """
    same_graph(graph_hash(captured), captured.constants)
    return _on_rank_0(lambda: plan_graph(captured, **given))


def shared_policy(policy: AnyPolicy) -> AnyPolicy:
    """``policy``, or the plan in a file that it names, which rank 0 reads for all ranks.

    Raises:
        OSError, ValueError: the file cannot be read, or is no plan, on every rank alike.
    """
    return _on_rank_0(lambda: as_plan(policy)) if is_path(policy) else policy


def _on_rank_0(make: Callable[[], Any]) -> Any:
    """What rank 0 makes, or the error that it raises, on every rank."""
    made: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            made = [make()]
        except Exception as error:  # every rank must hear of it, or the others wait for ever
            made = [_sendable(error)]
    dist.broadcast_object_list(made, src=0)
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]


def _sendable(error: Exception) -> Exception:
    """``error``, or its text where a user's exception cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
