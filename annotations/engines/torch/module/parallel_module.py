"""The parallel form of a module, and its planned graphs; ``entry`` has the call that makes it."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from annotations.consistency import check_setting, described, digest

from ...config import ComputeConfig
from ..capture.capture import Captured, CaptureError
from ..capture.dropout import draw_seed
from ..capture.open_sizes import named_as
from ..capture.replaced_parameters import call_in_dtype, whole_without_data
from ..capture.unsupported import refuse_sizes_by_values
from ..plan.engine_plan import EnginePlan, whole_copies
from ..plan.meshes import axis_names, mesh_of_copies
from ..plan.plan_summary import graph_hash
from ..plan.planning import Planned, Planning, captured_in, captured_open, shared_plan
from ..plan.policies import AnyPolicy, as_plan, is_path
from ..plan.rank_agreement import compare, facts_of, from_rank_0, gathered
from ..rates import known_rates
from ..run.execute import Program
from ..run.lowered import Lowered, OtherSizes
from ..strategies.placements import Placements
from .gradient_sync import DEFAULT_BUCKET_MB, Reducer
from .programs import Base, Modes, Programs
from .sharded_parameters import as_read, cut_to_fit, shard_parameters
from .training import TrainingModule


class ParallelModule(TrainingModule):
    """A module whose forward runs cut over the ranks of a plan.

        out = module(...)          every rank of a copy passes the same whole inputs
        out.backward()
        module.sync_grad()         once, before the optimizer's step

    Parameters, buffers and submodules have the original's names, so an optimizer and ``state_dict``
    work as on the original, and it loads the original's state. Parameters are whole on every rank,
    unless the plan shards some: then all are DTensors, as under FSDP2, and torch's
    ``get_model_state_dict(..., full_state_dict=True)`` gathers them for the original.

    ``plan`` is what the engine decided for the current train and eval modes; it prints as a table.
    """

    plan: EnginePlan
    compute_config: ComputeConfig
    compute_dtype: torch.dtype | None
    _original: torch.nn.Module

    def __init__(
        self,
        module: torch.nn.Module,
        dummy_forward_args: Mapping[str, Any],
        policy: AnyPolicy,
        config: ComputeConfig,
        compute_dtype: torch.dtype | None = None,
        *,
        lowered: bool = True,
        compile: bool = False,
    ) -> None:
        super().__init__()
        original = copy.deepcopy(module)
        # The same trees under the same names: state_dict, .to() and optimizers see the original.
        self._parameters = original._parameters
        self._buffers = original._buffers
        self._modules = original._modules
        self._non_persistent_buffers_set = original._non_persistent_buffers_set
        self.training = original.training
        self.compute_config = config
        object.__setattr__(self, "_original", original)
        self._dummy_forward_args = dict(dummy_forward_args)
        self.compute_dtype = compute_dtype
        self._kept: Mapping[str, Placements] | None = None
        self._reducer = None
        self._lowered, self._compile = lowered, compile
        self._programs = Programs()
        self._register_load_state_dict_pre_hook(cut_to_fit, with_module=True)
        if config.ranks > 1:
            self._join(policy)
        if config.plan_ngpus > 1:
            self._program()
        else:
            count = sum(p.nbytes for p in self.parameters() if p.requires_grad)
            self.plan = whole_copies(config.num_scale_units, count)

    def _join(self, policy: AnyPolicy) -> None:
        """Make the meshes of all ranks, which then agree on one policy and one set of weights."""
        config, tensors = self.compute_config, [*self.parameters(), *self.buffers()]
        where = tensors[0].device.type if tensors else "cpu", config.num_scale_units
        self._mesh = mesh_of_copies(*where, (config.plan_ngpus,))["axis0"]
        copies = mesh_of_copies(*where, config.mesh_shape)
        self._plan_mesh = copies[axis_names(config.mesh_shape)]
        # One rank reads a plan's file, for all.
        self._policy = from_rank_0(lambda: as_plan(policy)) if is_path(policy) else policy
        compare("example arguments", facts_of(self._dummy_forward_args, described))
        same_weights(self)
        cap = (config.reducer_bucket_cap_mb or DEFAULT_BUCKET_MB) * 2**20
        group = copies["copy"].get_group() if config.num_scale_units > 1 else None
        self._reducer = Reducer(cap, group, overlap=config.use_async_reducer)

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original's forward. Inputs and results are whole, on every rank of the copy.

        Inputs of new shapes are captured and planned anew, on all ranks of the copy. Cumulative
        lengths of fewer documents do not make a new shape. torch.compile does not trace this.

        Raises:
            LoweringError: the planned graph could not be traced on plain tensors.
            CaptureError: an input differs in structure, dtype or number of dims from
                ``dummy_forward_args``.
        """
        ranks = self.compute_config.plan_ngpus
        if ranks > 1 and torch.is_autocast_enabled(self._mesh.device_type):
            raise CaptureError(
                "torch.autocast around a parallelized module cannot change its graph; use it "
                "inside the module's forward, or parallelize(..., compute_dtype=...)"
            )
        if torch.is_grad_enabled() and self._reducer is not None:
            self._reducer.forward(list(self.parameters()))
        if ranks == 1:
            self._original.training = self.training
            return call_in_dtype(self._original, self.compute_dtype, args, kwargs)
        inputs = self._program().captured.inputs
        checked = check_setting()  # copies the batch to the host, which waits for the device
        if self._mesh.device_type == "cpu" if checked is None else checked:
            facts = facts_of(self._named(args, kwargs), digest)
            compare("batches of one copy", facts, self._mesh.get_group())
        flat = inputs.flatten(args, kwargs)
        seed = [draw_seed(self._mesh, dist.get_rank() // ranks)] if self.draws else []
        while True:
            program, fitted = self._program_for(flat)
            try:
                results = program(self._attribute, [*fitted, *seed])
            except OtherSizes as error:  # on all ranks; another graph is found or made
                if error.never:
                    self._programs.fix(program.captured.inputs.open, error.never)
                    self._programs.drop(self._modes_now(), program)
                continue
            return pytree.tree_unflatten(results, program.captured.out_spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises NotImplementedError: the planned graphs are bound to this module's parameters."""
        raise NotImplementedError(
            "a parallelized module cannot be copied or pickled: copy the module before it is "
            "parallelized, keep averages of its parameters() by name, or save its state_dict() (by "
            "torch.distributed.checkpoint where the plan keeps parameters in parts)"
        )

    def _named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by name, however they were passed; if forward cannot take them, by position."""
        try:
            return dict(inspect.signature(self._original.forward).bind(*args, **kwargs).arguments)
        except TypeError:
            return {**{f"argument {n}": value for n, value in enumerate(args)}, **kwargs}

    @property
    def draws(self) -> bool:
        """Whether the module, in its present modes, drops elements at random."""
        if self.compute_config.plan_ngpus > 1:
            return self._program().captured.draws
        dropouts = [m for m in self.modules() if isinstance(m, torch.nn.modules.dropout._DropoutNd)]
        return any(m.training and m.p > 0 for m in dropouts)

    def _attribute(self, name: str) -> Tensor:
        return as_read(attrgetter(name)(self))

    def _arrived(self, name: str, gradient: Tensor) -> None:
        assert self._reducer is not None
        self._reducer.arrived(self.get_parameter(name), gradient)

    def _program(self) -> Program | Lowered:
        """The planned graph for the current modes and the most recent shapes; made at first use,
        on all ranks."""
        program = self._programs.latest(self._modes_now())
        if program is None:
            program = self._made(self._dummy_forward_args, self._policy, None)
        self.plan = self._programs.plans[program]
        return program

    def _program_for(self, flat: list[Any]) -> tuple[Program | Lowered, list[Any]]:
        """The planned graph that takes these inputs, and the inputs in the form that it takes. For
        new shapes one is made on all ranks of the copy; if the policy is "auto", split like the
        current plan."""
        modes, latest = self._modes_now(), self._program()
        found = self._programs.find(modes, flat)
        while found is None and (base := self._to_open(modes, flat)) is not None:
            self._open(base, flat)
            found = self._programs.find(modes, flat)
        if found is None:
            arguments = latest.captured.inputs.with_room(flat, flat)
            policy = self.plan if self._policy == "auto" else self._policy
            self._made(arguments, policy, self._mesh.get_group())
            found = self._programs.find(modes, flat)
            assert found is not None, "a graph takes what it was captured with"
        self.plan = self._programs.plans[found[0]]
        return found

    def _to_open(self, modes: Modes, flat: list[Any]) -> Base | None:
        """What a graph that also takes other sizes may be made from; None if none may be made."""
        why = "parameters are kept in parts" if self._kept else ""
        why = "compile=True compiles for fixed sizes" if self._compile else why
        why = why if self._lowered else "lowered=False runs on DTensors"
        self._programs.why_fixed = why or self._programs.why_fixed
        return None if why else self._programs.to_open(modes, flat, self.compute_config.plan_ngpus)

    def _open(self, base: Base, flat: list[Any]) -> None:
        """Make a graph with the plan of ``base`` in which the sizes that differ in ``flat`` are
        open, on all ranks of the copy. If that is not possible, note why."""
        inputs, graph, why = base.captured.inputs, "none", ""
        dims, group = inputs.differing(flat), self._mesh.get_group()
        self._original.training = self.training
        try:
            given = self.compute_dtype, self._original, inputs.with_room(inputs.examples, flat)
            captured = captured_open(*given, dims, self.compute_config.plan_ngpus)
            named_as(captured, base.captured)
            base.planned.refuse_open_sizes(captured)
            program = self._program_of(captured, base.planned)
            graph = graph_hash(captured)
            agree = functools.partial(gathered, group=group)
            made = Lowered(program, arrived=self._arrived, agree=agree)
        except Exception as error:  # torch.export's are of many kinds
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
        compare("captured graphs", {"graph": graph, "open sizes": why}, group)
        if why:
            self._programs.fix(dims, why)
            return
        names = ", ".join(str(captured.user_inputs[n]) for n in sorted({n for n, _ in dims}))
        note = f"one graph for other sizes of {names}, as evenly cut"
        plan = replace(base.planned.report, notes=(*base.planned.report.notes, note))
        self._programs.add(self._modes_now(), made, plan)

    def planned_for(self, arguments: Mapping[str, Any]) -> tuple[Program, list[Any]]:
        """The planned graph that takes these arguments, and its flat inputs."""
        inputs = self._program().captured.inputs
        program, flat = self._program_for(inputs.flatten((), arguments))
        return program.program if isinstance(program, Lowered) else program, flat

    def _modes_now(self) -> Modes:
        return tuple(module.training for module in self.modules())

    def _made(
        self, arguments: Mapping[str, Any], policy: AnyPolicy, group: Any
    ) -> Program | Lowered:
        """Capture on every rank of ``group`` (None: all ranks), and plan on the first."""
        config, mesh, original = self.compute_config, self._plan_mesh, self._original
        original.training = self.training
        # No rank has the whole data of sharded parameters.
        without = whole_without_data(original) if self._kept else contextlib.nullcontext()
        with without as mode:
            captured = captured_in(self.compute_dtype, original, arguments, mode)
        trained = dict(self.named_parameters(remove_duplicate=False))
        dtypes = {name: p.dtype for name, p in trained.items()}
        rates = config.pas_config.get("rates") or known_rates(mesh, config.num_scale_units)
        device = next(iter(trained.values())).device if trained else "cpu"
        planning = Planning(captured, mesh, policy, config, dtypes, rates, device, self._kept)
        planned = shared_plan(planning, group)
        if self._compile:
            refuse_sizes_by_values(planned.graph_of(captured).graph, planned.report.splits)
        self._kept = planned.parameters
        shard_parameters(original, planned.parameters, mesh)
        made: Program | Lowered = self._program_of(captured, planned)
        if isinstance(made, Program) and self._lowered:
            made = Lowered(made, compiled=self._compile, arrived=self._arrived)
        report, why = planned.report, self._programs.why_fixed
        if why:
            report = replace(report, notes=(*report.notes, f"a graph for these sizes alone: {why}"))
        self._programs.add(self._modes_now(), made, report, Base(captured, planned))
        return made

    def _program_of(self, captured: Captured, planned: Planned) -> Program:
        """The graph of a plan, with the plan's strategies."""
        captured, named = planned.graph_of(captured), planned.strategies
        strategies = {n: named[n.name] for n in captured.graph.nodes if n.name in named}
        return Program(captured, strategies, self._plan_mesh, self.compute_dtype)


def same_weights(module: torch.nn.Module) -> None:
    """Broadcast rank 0's parameters and buffers to every rank."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor, src=0)
