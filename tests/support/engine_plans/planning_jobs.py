"""Jobs for the tests of plans on real ranks; see ``ranks.Pool``."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import engine_jobs
import steps
import torch
import torch.distributed as dist
from rank_groups import device
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from annotations import ComputeConfig, parallelize
from annotations.engines.torch import EnginePlan, Link, Rates, calibrate
from annotations.engines.torch.rates import known_rates, rates_file
from annotations.engines.torch.strategies.placements import cut_axes

# Computing is slow beside links, so that even tiny models are cut.
SLOW = Rates(1e8, 1e8, 1e9, (Link(1e-9, 1e12),))


def config(plan: int, shape: tuple[int, ...], **told: Any) -> ComputeConfig:
    return ComputeConfig(plan, dist.get_world_size(), pas_config={"mesh_shape": shape, **told})


def step(
    policy: Any,
    shape: tuple[int, ...],
    length: int,
    layers: int,
    told: dict[str, Any],
    batch: int = 1,
    lowered: bool = True,
) -> tuple[float, dict[str, Tensor], dict[str, Any], str]:
    """Loss, whole gradients, parameters in parts with their local sizes, the plan as JSON."""
    plan = math.prod(shape)
    model = engine_jobs.tiny_llama("ring", layers).to(device())

    def inputs(seed: int) -> dict[str, Tensor]:
        given = engine_jobs.sample("ring", batch, length, seed)
        return {name: t.to(device()) for name, t in given.items()}

    parallel = parallelize(model, inputs(1), policy, config(plan, shape, **told), lowered=lowered)
    loss, grads = steps.step(parallel, inputs(1 + dist.get_rank() // plan))
    lying = {
        name: (str(p.placements), tuple(p.to_local().shape))
        for name, p in parallel.named_parameters()
        if cut_axes(p)
    }
    for p in parallel.parameters():
        assert isinstance(p, DTensor) == isinstance(p.grad, DTensor) == bool(lying)
        assert not lying or p.grad.placements == p.placements
    assert list(parallel.state_dict()) == list(model.state_dict())
    return loss, grads, lying, parallel.plan.to_json()


class Received(TorchDispatchMode):
    """Counts the bytes that functional collectives bring to this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if "_c10d_functional" in name and isinstance(result, Tensor):
            self.count += self._received(name, args, result)
        return result

    def _received(self, name: str, args: Any, result: Tensor) -> int:
        if "all_gather_into_tensor" in name:
            return result.nbytes * (args[1] - 1) // args[1]
        if "reduce_scatter_tensor" in name:
            return result.nbytes * (args[2] - 1)
        if "all_reduce" in name:
            group = torch.distributed.distributed_c10d._resolve_process_group(args[2])
            return 2 * result.nbytes * (group.size() - 1) // group.size()
        if "all_to_all_single" in name:
            group = torch.distributed.distributed_c10d._resolve_process_group(args[3])
            return result.nbytes - result.nbytes * args[1][group.rank()] // sum(args[1])
        return 0


def received(policy: Any, shape: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Bytes of a step between ops and inside attention, each forward and backward: counted and
    planned."""
    plan = dist.get_world_size()
    parallel = parallelize(
        engine_jobs.tiny_llama("ring", 1),
        engine_jobs.sample("ring", 1, 32),
        policy,
        config(plan, shape, rates=SLOW),
    )
    batch = engine_jobs.sample("ring", 1, 32)
    parallel(**batch).backward()  # traced
    before = steps.received_bytes()
    with Received() as forward:
        loss = parallel(**batch)
    between = steps.received_bytes()
    with Received() as backward:
        loss.backward()
    inside = [between - before, steps.received_bytes() - between]
    counted = [forward.count, backward.count, *inside]
    rows = [(row, n) for row, n in parallel.plan.rows if row.op != "sync_grad"]
    attention = [(r, n) for r, n in rows if r.op == "wrap_ring_attn_func" and r.split != "-"]
    between = [(r, n) for r, n in rows if (r, n) not in attention]
    planned = [
        sum(getattr(r, side) * n for r, n in part)
        for part in (between, attention)
        for side in ("forward_bytes", "backward_bytes")
    ]
    return counted, planned


def replayed(path: str) -> tuple[str, dict[str, str]]:
    """A plan made, and what it is or which error there is when it is edited and given back."""
    given = engine_jobs.sample("ring", 1, 16)

    def make(policy: Any) -> EnginePlan:
        model = engine_jobs.tiny_llama("ring", 2)
        return parallelize(model, given, policy, config(2, (2,))).plan

    first = make("cp")
    plan = EnginePlan.from_json(first.to_json())
    assert plan == first
    if dist.get_rank() == 0:
        Path(path).write_text(plan.to_json())
    dist.barrier()
    wrong = {"ring_attn": replace(plan.ops["ring_attn"], split=("hd",))}
    edited: dict[str, Any] = {
        "file": path,
        "first layer open": replace(plan, ops={"ring_attn_1": plan.ops["ring_attn_1"]}),
        "heads": replace(plan, ops=wrong, splits={}),
        "at odds": replace(plan, splits={"ring_attn": "g"}),
        "no op": replace(plan, splits={"attention": "l"}),
        "another graph": replace(plan, graph="0"),
    }
    said = {}
    for name, policy in edited.items():
        try:
            said[name] = make(policy).to_json()
        except ValueError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return first.to_json(), said


class Tied(nn.Module):
    """A head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(16, 8).double(), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x)).square().mean()


def tied() -> tuple[Tensor, bool, float, list[str]]:
    """Gradient of a parameter of two names in parts, whether it is still one, a loss in eval mode,
    for which the module is captured again, and how the parameter lies."""
    given = {"x": torch.arange(12).view(2, 6)}
    policy = {"embed.weight": 1}
    parallel = parallelize(Tied(), given, policy, config(2, (2,)), lowered=False)
    parallel(**given).backward()
    parallel.sync_grad()
    weight = parallel.embed.weight
    parallel.load_state_dict({name: t + 1 for name, t in Tied().state_dict().items()})
    assert (weight.full_tensor() - Tied().embed.weight - 1).abs().max() < 1e-12
    parallel.load_state_dict(Tied().state_dict())
    loss = parallel.eval()(**given).item()
    assert parallel.head.weight is weight
    return weight.grad.full_tensor(), isinstance(weight, DTensor), loss, list(parallel.state_dict())


def calibrated(folder: str) -> tuple[Rates, Rates, Rates, bool, str]:
    """Rates before, as measured and as read back; whether the file is there; what a plan says."""
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=folder):
        given = engine_jobs.sample("ring", 1, 16)
        parallel = parallelize(engine_jobs.tiny_llama("ring"), given, "cp", config(2, (2,)))
        unknown = known_rates(parallel._plan_mesh)
        dist.barrier()  # rank 0 keeps them
        found = calibrate(parallel._plan_mesh)
        again = parallelize(engine_jobs.tiny_llama("ring"), given, "cp", config(2, (2,)))
        known = known_rates(parallel._plan_mesh)
        return unknown, found, known, rates_file(parallel._plan_mesh).exists(), str(again.plan)


def a_file_that_only_rank_0_has(folder: str) -> list[str]:
    """What becomes of a plan's file, and of files that are missing or no plans."""
    given = engine_jobs.loss_inputs()
    model, told = engine_jobs.Losses("sum"), config(2, (2,))
    first = parallelize(model, given, "cp", told).plan
    own = Path(folder) / f"{dist.get_rank()}.json"
    if dist.get_rank() == 0:
        own.write_text(first.to_json())
    said = [str(parallelize(model, given, own, told).plan == first)]  # type: ignore[arg-type]
    for wrong in (own.with_name("missing.json"), Path(__file__)):
        try:
            parallelize(model, given, wrong, told)  # type: ignore[arg-type]
        except (OSError, ValueError) as error:
            said.append(type(error).__name__)
    return said
