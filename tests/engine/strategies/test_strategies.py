"""What is offered to planners of an annotated op, and what the policies pick of it."""

from __future__ import annotations

import dtensor_jobs
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

from annotations import ComputeConfig, record_of
from annotations.engines.torch.plan.policies import shard_sequence
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
