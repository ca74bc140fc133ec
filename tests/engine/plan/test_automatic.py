"""What the planner decides by itself, with rates given; no ranks, devices or data."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from shared.llama import Llama, LlamaConfig
from torch import nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from annotations import ComputeConfig
from annotations.engines.torch import (
    EnginePlan,
    Link,
    PlanningError,
    PolicyError,
    Rates,
    plan_without_ranks,
    plans_without_ranks,
)
from annotations.engines.torch.plan import solver
from annotations.engines.torch.strategies.placements import local_shape, share
from annotations.engines.torch.strategies.reshard import steps
from customized_ops.ring_attention import wrap_ring_attn_func


def llama(tokens: int, **sizes: Any) -> tuple[Llama, dict[str, torch.Tensor]]:
    with torch.device("meta"):
        names = ("tokens", "targets", "position_ids")
        example = {name: torch.zeros(1, tokens, dtype=torch.int64) for name in names}
        return Llama(LlamaConfig(**sizes)).bfloat16(), example


def config(*shape: int, **told: Any) -> ComputeConfig:
    ranks = math.prod(shape)
    return ComputeConfig(ranks, ranks, pas_config={"mesh_shape": shape, **told})


def link(gigabytes: float) -> Link:
    return Link(1e-5, gigabytes * 1e9)


def rates(flops: float, *links: Link) -> dict[str, Rates]:
    return {"rates": Rates(flops, flops, 2e12, links)}


MEDIUM = {"dim": 1024, "layers": 2, "heads": 8, "kv_heads": 8, "hidden": 2816, "vocab": 1024}


@pytest.fixture(scope="module")
def medium() -> dict[str, EnginePlan]:
    """Plans of one model for several machines; each once, in natural order."""
    fast = {"hoist": False, **rates(3e14, link(200))}
    machines = {
        "fast links": config(4, **fast),
        "little memory": config(4, **fast, memory_bytes=6.2e8),
    }
    found = plans_without_ranks(*llama(16384, **MEDIUM), "auto", list(machines.values()))
    return dict(zip(machines, found, strict=True))


def linears(plan: EnginePlan) -> set[tuple[str, ...]]:
    return {op.inputs for name, op in plan.ops.items() if name.startswith("linear")}


@pytest.mark.slow
def test_fast_links_hide_the_keys(medium: dict[str, EnginePlan]) -> None:
    """All on the sequence; attention computes while its keys arrive."""
    plan = medium["fast links"]
    assert {plan.splits[name] for name in ("ring_attn", "ring_attn_1")} == {"l"}
    assert linears(plan) == {("S1", "R")} and not plan.parameters


@pytest.mark.slow
def test_slow_links_want_heads() -> None:
    """Ulysses: attention on heads between neighbours on the sequence, by four all-to-alls."""
    slow = config(4, **rates(3e13, link(2)))
    plan = plan_without_ranks(*llama(16384, **MEDIUM), "auto", slow)
    assert {plan.splits[name] for name in ("ring_attn", "ring_attn_1")} == {"h"}
    assert linears(plan) == {("S1", "R")} and not plan.parameters
    moved = [(row, n) for row, n in plan.rows if "cut on dim 1 -> cut on dim 2" in row.moves]
    assert sum(n for _, n in moved) == 3 * 2  # q, k and v of two layers


class Attends(nn.Module):
    """Attention between two matrices."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.into, self.out = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.into(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return self.out(wrap_ring_attn_func(q, k, v).flatten(2)).square().sum()


def attends(tokens: int, dim: int, heads: int) -> tuple[Attends, dict[str, torch.Tensor]]:
    with torch.device("meta"):
        return Attends(dim, heads).bfloat16(), {"x": torch.zeros(1, tokens, dim).bfloat16()}


# Of as many tokens that attention's calls, not starting them, are what takes time.
MANY = 65536


@pytest.mark.parametrize(
    "make",
    [
        lambda: attends(MANY, MEDIUM["dim"], MEDIUM["heads"]),
        pytest.param(lambda: llama(MANY, **MEDIUM | {"layers": 1}), marks=pytest.mark.slow),
    ],
    ids=["attention alone", "llama"],
)
def test_heads_on_the_fast_axis_and_the_sequence_on_the_other(make: Any) -> None:
    two_axes = config(4, 2, hoist=False, **rates(3e14, link(20), link(400)))
    plan = plan_without_ranks(*make(), "auto", two_axes)
    assert plan.splits["ring_attn"] == ("l", "h")
    assert plan.ops["ring_attn"].inputs == ("S1,S2",) * 3
    assert "S1,S1" in {inputs[0] for inputs in linears(plan)}


def test_little_memory_keeps_parameters_in_parts(medium: dict[str, EnginePlan]) -> None:
    free, plan = medium["fast links"], medium["little memory"]
    assert plan.held is not None and free.held is not None
    assert plan.held.total <= 6.2e8 < free.held.total
    assert plan.parameters and plan.seconds > free.seconds
    assert "memory a rank, estimated:" in str(plan) and "(of 591.3 MiB)" in str(plan)


def test_layers_that_are_alike_are_planned_alike(medium: dict[str, EnginePlan]) -> None:
    for plan in medium.values():
        assert len({(op.split, op.inputs) for n, op in plan.ops.items() if "ring_attn" in n}) == 1


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).unflatten(-1, (4, 8))
        return wrap_ring_attn_func(y, y, y).sum()


def test_what_cannot_be() -> None:
    with torch.device("meta"):
        model, example = Small(), {"x": torch.zeros(1, 64, 32)}
    with pytest.raises(
        PlanningError, match=r"into 1000 B a rank .*smallest is estimated to need 2"
    ):
        plan_without_ranks(model, example, "auto", config(2, memory_bytes=1e3))
    with pytest.raises(PolicyError, match="'hybrid' needs a mesh of two axes"):
        plan_without_ranks(model, example, "hybrid", config(4))
    with pytest.raises(PolicyError, match=r"cannot be split on \('l', 'l'\) over a mesh of \(2, 2"):
        plan_without_ranks(model, example, {"ring_attn": ("l", "l")}, config(2, 2))
    with pytest.raises(PolicyError, match="linear cannot be cut on 5 over a mesh of"):
        plan_without_ranks(model, example, {"linear": 5}, config(2))
    with pytest.raises(ValueError, match="must be counts of ranks whose product is plan_ngpus=4"):
        plan_without_ranks(model, example, "cp", ComputeConfig(4, 4, pas_config={"mesh_shape": 3}))


def test_names_force_what_they_name() -> None:
    policy = {"blocks.0.attention": "h", "ring_attn_1": "l", "blocks.*.gate": 2, "*norm": "whole"}
    plan = plan_without_ranks(*llama(16384, **MEDIUM), policy, config(4))
    assert plan.splits["ring_attn"] == "h" and plan.splits["ring_attn_1"] == "l"
    assert plan.ops["linear_4"].outputs == plan.ops["linear_11"].outputs == ("S2",)
    assert all(op.outputs == ("R",) for n, op in plan.ops.items() if n.startswith("rms_norm"))


@pytest.mark.slow
def test_a_large_model_in_seconds() -> None:
    """32 layers, 8 billion parameters, 131,072 tokens, on 8 and on 8 x 8 ranks; time of this
    process, however busy the machine is."""
    start = time.process_time()
    sizes = {"dim": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336, "vocab": 128256}
    model, example = llama(131072, layers=32, **sizes)
    one, two = plans_without_ranks(
        model, example, "auto", [config(8, memory_bytes=141e9), config(8, 8, memory_bytes=141e9)]
    )
    assert time.process_time() - start < 20
    assert one.splits["ring_attn"] == "l" and one.parameters
    assert two.splits["ring_attn"] == ("l", "g")
    for plan, limit in ((one, 141e9), (two, 141e9)):
        assert plan.held is not None and plan.held.total <= limit


R, P = Replicate(), Partial()


@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        ((Shard(1), Shard(1)), (Shard(1), Shard(2)), ["all-to-all"]),
        # The outer axis cannot let go of a dim that the inner one still cuts.
        ((Shard(1), Shard(1)), (R, Shard(1)), ["all-gather", "all-gather", "slice"]),
        ((P, R), (Shard(1), Shard(1)), ["reduce-scatter", "slice"]),
        ((P, P), (R, R), ["all-reduce", "all-reduce"]),
        ((R, R), (Shard(0), Shard(0)), ["slice", "slice"]),
    ],
)
def test_paths(
    source: tuple[Placement, ...], target: tuple[Placement, ...], kinds: list[str]
) -> None:
    path = steps((4, 16, 8), source, target, (2, 2))
    assert [step.kind for step in path] == kinds
    assert [path[0].before, path[-1].after] == [source, target]


def test_parts_of_parts() -> None:
    """As DTensor cuts: 30 over 4 is 8 8 8 6; over 2 and then 2 it is 8 7 8 7."""
    assert [share(30, 4, r) for r in range(4)] == [8, 8, 8, 6]
    places = Shard(0), Shard(0)
    nested = [local_shape((30,), places, (2, 2), (a, b)) for a in range(2) for b in range(2)]
    assert nested == [(8,), (7,), (8,), (7,)]


def test_a_plan_that_is_only_the_best_found_in_time_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = solver.LinearProgram()
    program.at_most([(program.add(-1.0, binary=True), 1.0)], 1.0)
    assert program.solve().tolist() == [1.0]
    found = SimpleNamespace(status=solver.OUT_OF_TIME, x=np.zeros(1), mip_gap=0.25)
    monkeypatch.setattr(solver, "milp", lambda *_, **__: found)
    with pytest.warns(UserWarning, match=r"stopped after 60 s.* 25\.0% slower"):
        assert program.solve().tolist() == [0.0]
    found.x = None
    with pytest.raises(PlanningError, match=r"in 60 s, though there may be one: leave more memory"):
        program.solve()
