"""The parallel form of a module, and its planned graphs; ``entry`` has the call that makes it."""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from annotations.consistency import check_setting, described, digest

from ...config import ComputeConfig
from ..capture.capture import CaptureError
from ..capture.dropout import draw_seed
from ..capture.replaced_parameters import call_in_dtype, whole_without_data
from ..plan.engine_plan import EnginePlan, whole_copies
from ..plan.meshes import axis_names, mesh_of_copies
from ..plan.planning import Planning, captured_in, shared_plan
from ..plan.policies import AnyPolicy, as_plan, is_path
from ..plan.rank_agreement import compare, facts_of, from_rank_0
from ..rates import known_rates
from ..run.execute import Program
from ..run.lowered import Lowered
from ..strategies.placements import Placements
from .gradient_sync import DEFAULT_BUCKET_MB, Reducer
from .sharded_parameters import as_read, cut_to_fit, shard_parameters
from .training import TrainingModule

Modes = tuple[bool, ...]  # of each module in order: whether it trains

# Graphs of one mode that are kept, and the number from which on a warning says that they are many.
MOST, MANY = 16, 4


class Programs:
    """Planned graphs by the modes of a module, the one that was used last at the end; and the plan
    of each."""

    def __init__(self) -> None:
        self.plans: dict[Program | Lowered, EnginePlan] = {}
        self._of: dict[Modes, OrderedDict[Program | Lowered, None]] = {}
        self._warned = False

    def latest(self, modes: Modes) -> Program | Lowered | None:
        """The graph that was used last."""
        known = self._of.get(modes)
        return next(reversed(known)) if known else None

    def find(self, modes: Modes, flat: Sequence[Any]) -> tuple[Program | Lowered, list[Any]] | None:
        """A graph that takes these flat inputs, and them as it takes them."""
        known = self._of[modes]
        for program in reversed(known):
            fitted = program.captured.inputs.fitted(flat)
            if fitted is not None:
                known.move_to_end(program)
                return program, fitted
        return None

    def add(self, modes: Modes, program: Program | Lowered, plan: EnginePlan) -> None:
        """Keep a graph; drops the one that was not used for the longest, if there are too many."""
        known = self._of.setdefault(modes, OrderedDict())
        known[program] = None
        self.plans[program] = plan
        if len(known) > MOST:
            dropped, _ = known.popitem(last=False)
            del self.plans[dropped]
        if len(known) >= MANY and not self._warned:
            self._warned = True
            warnings.warn(
                f"a parallelized module has met inputs of {len(known)} shapes, and captures and "
                f"plans each anew; the last {MOST} are kept. Fill batches up to a few totals",
                stacklevel=6,
            )


class ParallelModule(TrainingModule):
    """A module whose forward runs cut over the ranks of a plan.

        out = module(...)          every rank of a copy passes the same whole inputs
        out.backward()
        module.sync_grad()         once, before the optimizer's step

    Parameters, buffers and submodules have the original's names, so an optimizer and ``state_dict``
    work as on the original, and it loads the original's state. Parameters are whole on every rank;
    where the plan shards some all are DTensors, as under FSDP2, which torch's
    ``get_model_state_dict(..., full_state_dict=True)`` gathers for the original.

    ``plan`` is what the engine decided for the present modes; it prints as a table.
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
        """Meshes of all ranks, which then have one policy and one set of weights."""
        config, tensors = self.compute_config, [*self.parameters(), *self.buffers()]
        where = tensors[0].device.type if tensors else "cpu", config.num_scale_units
        self._mesh = mesh_of_copies(*where, (config.plan_ngpus,))["axis0"]
        copies = mesh_of_copies(*where, config.mesh_shape)
        self._plan_mesh = copies[axis_names(config.mesh_shape)]
        # One rank reads a file of a plan, for all.
        self._policy = from_rank_0(lambda: as_plan(policy)) if is_path(policy) else policy
        compare("example arguments", facts_of(self._dummy_forward_args, described))
        same_weights(self)
        cap = (config.reducer_bucket_cap_mb or DEFAULT_BUCKET_MB) * 2**20
        group = copies["copy"].get_group() if config.num_scale_units > 1 else None
        self._reducer = Reducer(cap, group, overlap=config.use_async_reducer)

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original's forward. Inputs and results are whole, on every rank of the copy.

        Inputs of other shapes than before are captured and planned anew, on all ranks of the copy;
        cumulative lengths of fewer documents are no other shape. torch.compile leaves it alone.

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
        program, flat = self._program_for(inputs.flatten(args, kwargs))
        if program.captured.draws:
            flat.append(draw_seed(self._mesh, dist.get_rank() // ranks))
        results = program(self._attribute, flat)
        return pytree.tree_unflatten(results, program.captured.out_spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises NotImplementedError: what is planned and traced is of this module's parameters."""
        raise NotImplementedError(
            "a parallelized module cannot be copied or pickled: copy the module before it is "
            "parallelized, keep averages of its parameters() by name, or save its state_dict() (by "
            "torch.distributed.checkpoint where the plan keeps parameters in parts)"
        )

    def _named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by name, however they were passed; those that do not fit, as they were."""
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
        """The planned graph for the present modes and the shapes that were met last; made on first
        use, on all ranks."""
        program = self._programs.latest(self._modes_now())
        if program is None:
            program = self._made(self._dummy_forward_args, self._policy, None)
        self.plan = self._programs.plans[program]
        return program

    def _program_for(self, flat: list[Any]) -> tuple[Program | Lowered, list[Any]]:
        """The planned graph that takes these inputs, and them as it takes them. For new shapes one
        is made on all ranks of the copy: as the others are split, if the policy is "auto"."""
        modes, latest = self._modes_now(), self._program()
        found = self._programs.find(modes, flat)
        if found is None:
            arguments = latest.captured.inputs.grown(flat)
            policy = self.plan if self._policy == "auto" else self._policy
            self._made(arguments, policy, self._mesh.get_group())
            found = self._programs.find(modes, flat)
            assert found is not None, "a graph takes what it was captured with"
        self.plan = self._programs.plans[found[0]]
        return found

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
        """Capture on every rank of ``group`` (None: of all), and plan on the first."""
        config, mesh, original = self.compute_config, self._plan_mesh, self._original
        original.training = self.training
        # Of sharded parameters no rank has the whole data.
        without = whole_without_data(original) if self._kept else contextlib.nullcontext()
        with without as mode:
            captured = captured_in(self.compute_dtype, original, arguments, mode)
        trained = dict(self.named_parameters(remove_duplicate=False))
        dtypes = {name: p.dtype for name, p in trained.items()}
        rates = config.pas_config.get("rates") or known_rates(mesh, config.num_scale_units)
        device = next(iter(trained.values())).device if trained else "cpu"
        planning = Planning(captured, mesh, policy, config, dtypes, rates, device, self._kept)
        planned = shared_plan(planning, group)
        self._kept = planned.parameters
        shard_parameters(original, planned.parameters, mesh)
        captured, named = planned.graph_of(captured), planned.strategies
        strategies = {n: named[n.name] for n in captured.graph.nodes if n.name in named}
        program = Program(captured, strategies, mesh, self.compute_dtype)
        made: Program | Lowered = program
        if self._lowered:
            made = Lowered(program, compiled=self._compile, arrived=self._arrived)
        self._programs.add(self._modes_now(), made, planned.report)
        return made


def same_weights(module: torch.nn.Module) -> None:
    """Every rank starts from rank 0's parameters and buffers."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor, src=0)
