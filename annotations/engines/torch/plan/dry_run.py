"""Planning without ranks, devices or memory: the plan of a model for any number of ranks.

with torch.device("meta"):
    model = Llama(...)
    example = {"tokens": torch.zeros(1, 131072, dtype=torch.int64), ...}
print(plan_without_ranks(model, example, "auto", ComputeConfig(64, 64, ...)))
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...config import ComputeConfig, check_embedded
from ..capture.replaced_parameters import whole_without_data
from ..rates import Rates
from .engine_plan import EnginePlan
from .meshes import axis_names
from .planning import Planning, captured_in
from .policies import AnyPolicy, as_plan


def plan_without_ranks(
    module: torch.nn.Module,
    dummy_forward_args: Mapping[str, Any],
    pas_policy: AnyPolicy,
    compute_config: ComputeConfig,
    rates: Rates | None = None,
    *,
    module_dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype | None = None,
) -> EnginePlan:
    """The plan that ``parallelize`` would make, in one process that holds no tensor's data.

    Other arguments are as for ``parallelize``; ``pas_config["memory_bytes"]`` is what a rank may
    hold, by default without a limit.

    Args:
        module, dummy_forward_args: on any device; on "meta" they take no memory.
        rates: speeds to plan with; round numbers by default.
    Raises:
        RuntimeError: ``torch.distributed`` is initialised already.
        PolicyError, CaptureError, PlanningError: as for ``parallelize``.
    """
    given = module, dummy_forward_args, pas_policy, [compute_config], rates
    return plans_without_ranks(*given, module_dtype=module_dtype, compute_dtype=compute_dtype)[0]


def plans_without_ranks(
    module: torch.nn.Module,
    dummy_forward_args: Mapping[str, Any],
    pas_policy: AnyPolicy,
    compute_configs: Sequence[ComputeConfig],
    rates: Rates | None = None,
    *,
    module_dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype | None = None,
) -> list[EnginePlan]:
    """:func:`plan_without_ranks` for several sets of ranks; the module is captured once."""
    policy, plans = as_plan(pas_policy), []
    with whole_without_data(module, module_dtype) as mode:
        parameters = {n: p.dtype for n, p in module.named_parameters(remove_duplicate=False)}
        captured = captured_in(compute_dtype, module, dummy_forward_args, mode)
        for config in compute_configs:
            check_embedded(config)
            with _fake_mesh(config.mesh_shape) as mesh:
                speeds = rates or config.pas_config.get("rates") or Rates()
                planning = Planning(captured, mesh, policy, config, parameters, speeds)
                plans.append(planning.plan().report)
    return plans


@contextmanager
def _fake_mesh(shape: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """A mesh of which only this process exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError(
            "plan_without_ranks: torch.distributed is initialised; plan in a process of its own"
        )
    dist.init_process_group("fake", rank=0, world_size=math.prod(shape), store=FakeStore())
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=axis_names(shape))
    finally:
        dist.destroy_process_group()
