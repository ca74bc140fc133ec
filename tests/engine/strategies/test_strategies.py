"""What is offered to planners of an annotated op, and what the policies pick of it."""

from __future__ import annotations

from typing import Any

import dtensor_jobs
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

from annotations import ComputeConfig, record_of
from annotations.engines.torch import plans_without_ranks
from annotations.engines.torch.plan.policies import shard_sequence
from annotations.engines.torch.strategies import dtensor_probe
from annotations.engines.torch.strategies.choices import OpSite
from annotations.engines.torch.strategies.one_axis import annotated_strategies


def test_alternatives_that_differ_in_inputs_alone() -> None:
    """Groups of columns, or columns with w whole: the same result, and planners may want either.
    What both alternatives offer alike is there once."""
    call = make_fx(lambda x, w: dtensor_jobs.scale_groups(x, w), tracing_mode="fake")
    graph = call(torch.zeros(4, 12), torch.zeros(4))
    [node] = [n for n in graph.graph.nodes if record_of(n.target)]
    found = annotated_strategies(node, dtensor_jobs.scale_groups.record, 2)
    assert [(s.identifier, s.inputs, s.outputs) for s in found] == [
        (None, (Replicate(), Replicate()), (Replicate(),)),
        ("l", (Shard(0), Replicate()), (Shard(0),)),
        ("g", (Shard(1), Shard(0)), (Shard(1),)),
        ("h", (Shard(1), Replicate()), (Shard(1),)),
    ]


@pytest.mark.parametrize(
    ("splits", "communicates", "picked"),
    [
        (("v", "l"), ("l", "v"), "l"),
        (("v", "lq"), ("l", "v"), "lq"),
        (("b", "v", "a"), ("a", "v"), "a"),
        (("b", "v"), ("a", "v"), "v"),
    ],
)
def test_cp_looks_for_the_sequence_first(
    splits: tuple[str, ...], communicates: tuple[str, ...], picked: str
) -> None:
    op = OpSite("op", "op", "", splits, communicates, ())
    assert shard_sequence([op], ComputeConfig(2, 2)) == {"op": picked}


def test_strided_pieces_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a result would be cut into thousands of them, DTensor is not asked to the end."""
    made, chunk = [], torch.chunk

    def counting(*given: Any, **by_name: Any) -> tuple[Tensor, ...]:
        made.append(given[1])
        return chunk(*given, **by_name)

    monkeypatch.setattr(torch, "chunk", counting)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Flatten(0, 1))
    given, config = {"input": torch.zeros(20_000, 4)}, ComputeConfig(2, 2)
    [plan] = plans_without_ranks(model, given, "auto", [config])
    assert plan.parts == 2 and len(made) < 2 * dtensor_probe.MOST_CALLS
