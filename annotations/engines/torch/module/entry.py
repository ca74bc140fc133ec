"""``parallelize``: checks a call, compares it over all ranks, and only then makes the module.

If one rank refuses its call, every rank raises, so that none waits for it forever.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from annotations.progress import stage

from ...config import NNSCALER_OPTIONS, ComputeConfig, check_embedded
from ..capture.capture import bound_arguments
from ..plan.engine_plan import EnginePlan
from ..plan.policies import AnyPolicy, is_path, named
from ..plan.rank_agreement import same_request
from .parallel_module import ParallelModule, same_weights
from .training import refuse_wrong_steps
from .verification import same_as_alone


def parallelize(
    module_or_module_class: torch.nn.Module | type[torch.nn.Module],
    dummy_forward_args: Mapping[str, Any],
    pas_policy: AnyPolicy,
    compute_config: ComputeConfig,
    *,
    module_dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype | None = None,
    verify: bool | Mapping[str, Any] = False,
    lowered: bool = True,
    compile: bool = False,
    **nnscaler_only: Any,
) -> ParallelModule:
    """Cut a single-device module over ranks, with the embedded engine.

    Every rank makes the same call, after ``torch.distributed.init_process_group``. The module is
    copied; all copies start from rank 0's weights.

    Args:
        module_or_module_class: a module; classes are not supported yet.
        dummy_forward_args: example arguments of ``forward`` by name.
        pas_policy: what is decided before the rest is planned: ``"auto"`` (nothing), ``"cp"``,
            ``"dp"``, ``"ulysses"``, ``"tp"``, ``"hybrid"``, a mapping, a function (:data:`Policy`),
            an earlier plan (:class:`EnginePlan`), or the path of a file that holds one. The table
            in ``annotations/docs/planning.md`` says what each decides.
        compute_config: the number of ranks, their mesh, and settings of the planner.
        module_dtype: convert the copy to this dtype first.
        compute_dtype: cast parameters to this dtype where they are read, as FSDP2's
            ``MixedPrecisionPolicy(param_dtype=...)`` does. Parameters, gradients and their sums
            over ranks stay in the parameters' own dtype; buffers and inputs are not cast.
        verify: run one step both in parallel and on every rank alone, and compare results and
            every gradient. True uses the example arguments. A mapping gives other, smaller ones by
            name; the policy makes another plan for them. Needs the memory of a whole model and
            batch.
        lowered: trace the planned graph once, at the first call of each kind, into ops on this
            rank's plain tensors. False runs every op on DTensors, several times slower on the host.
        compile: have inductor compile what was traced. Costs a minute or so at the first calls.
        nnscaler_only: nnscaler's other keyword arguments, at their defaults.
    Returns:
        A module to train like the original, with ``sync_grad()`` before each optimizer step.

    Raises:
        PolicyError: ``pas_policy`` is none of these, or asks for a split that an op does not allow.
        CaptureError: the module does something that cannot be captured or run in parallel yet, or
            another rank makes a different call, or one that is refused.
        NotImplementedError: a module class, or a keyword argument or field of the config that only
            nnscaler acts on.
        ValueError: ``runtime_ngpus`` is not the number of ranks, ``compile`` lacks ``lowered``, or
            the module is parallelized already.
        TypeError: ``dummy_forward_args`` is not a mapping, or a dtype argument is not a dtype.
        RuntimeError: ``torch.distributed`` is not initialised.
        PlanningError: no plan fits into the memory of a rank; says how much the smallest needs.
        VerificationError: with ``verify``, a result or gradient differs from the single module's;
            names it, and the first op that is wrong by itself.
    """
    original: Any = module_or_module_class
    module, example, problem = original, dummy_forward_args, None
    options = {
        "module_dtype": module_dtype,
        "compute_dtype": compute_dtype,
        "verify": verify if isinstance(verify, bool) else "on arguments",
        "lowered": lowered,
        "compile": compile,
    }
    try:
        _check_options(options, nnscaler_only)
        check_embedded(compute_config)
        _check_module(module, example, verify, compute_config)
        if not isinstance(pas_policy, EnginePlan) and not is_path(pas_policy):
            named(pas_policy)
        if module_dtype is not None:
            module = copy.deepcopy(module).to(module_dtype)
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        problem = error
    _refuse_together(problem, compute_config, pas_policy, module, options)

    def made(example: Mapping[str, Any]) -> ParallelModule:
        given = module, example, pas_policy, compute_config, compute_dtype
        parallel = ParallelModule(*given, lowered=lowered, compile=compile)
        refuse_wrong_steps(parallel, original)
        return parallel

    if verify is False or compute_config.ranks == 1:
        return made(example)
    compared = verify if isinstance(verify, Mapping) else example
    parallel, single = made(compared), copy.deepcopy(module)
    same_weights(single)
    with stage("verifying"):
        same_as_alone(parallel, single, compared)
    return parallel if compared is example else made(example)


def _check_options(options: Mapping[str, Any], nnscaler_only: Mapping[str, Any]) -> None:
    for name, value in nnscaler_only.items():
        if name not in NNSCALER_OPTIONS:
            raise TypeError(f"parallelize() got an unexpected keyword argument {name!r}")
        if value != NNSCALER_OPTIONS[name]:
            raise NotImplementedError(f"parallelize: {name}={value!r} is not supported yet")
    if options["compile"] and not options["lowered"]:
        raise ValueError(
            "parallelize: compile=True needs lowered=True: what is compiled is lowered"
        )
    for name in ("module_dtype", "compute_dtype"):
        dtype = options[name]
        if not isinstance(dtype, torch.dtype | None):
            raise TypeError(f"parallelize: {name} must be a torch.dtype or None, got {dtype!r}")


def _check_module(module: Any, example: Any, verify: Any, config: ComputeConfig) -> None:
    """Check the module and its arguments."""
    if not isinstance(module, torch.nn.Module):
        raise NotImplementedError(
            "parallelize: module classes are not supported yet; pass a module"
        )
    if any(isinstance(part, ParallelModule) for part in module.modules()):
        raise ValueError("parallelize: the module, or a part of it, is parallelized already")
    if not isinstance(example, Mapping):
        raise TypeError(
            "parallelize: dummy_forward_args must map forward's argument names to example "
            f"values, got {type(example).__name__}"
        )
    if not isinstance(verify, bool | Mapping):
        raise TypeError(
            "parallelize: verify must be True, False, or a mapping of forward's argument names to "
            f"values, got {verify!r}"
        )
    if config.plan_ngpus > 1:  # whole copies are not captured
        bound_arguments(module, example)
        if isinstance(verify, Mapping):
            bound_arguments(module, verify, "verify's arguments")


def _refuse_together(
    problem: Exception | None,
    config: ComputeConfig,
    policy: AnyPolicy,
    module: Any,
    options: Mapping[str, Any],
) -> None:
    """Raise this rank's problem, or an error if another rank has one or makes a different call."""
    alone = _nobody_to_ask(config)
    if alone is None and config.ranks > 1:
        same_request(config, policy, module, options, problem)
    if refused := problem or alone:
        raise refused


def _nobody_to_ask(config: ComputeConfig) -> Exception | None:
    """Why this rank cannot compare its call with those of all ranks, or None."""
    asked, initialised = config.ranks, dist.is_initialized()
    ranks = dist.get_world_size() if initialised else 1
    if ranks == asked:
        return None
    if initialised:
        return ValueError(f"parallelize: runtime_ngpus={asked}, but the world has {ranks} ranks")
    return RuntimeError(
        f"parallelize: {asked} ranks asked for, but torch.distributed is not initialised; call "
        "torch.distributed.init_process_group() first"
    )
