"""Jobs for the distributed op tests; see ``ranks.Pool``."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from op_cases import DENSE_OPS, Case, run_rank
from torch._subclasses.fake_tensor import FakeTensorMode

from customized_ops.ring_attention import wrap_ring_attn_func
from customized_ops.ring_attention.fuzz.kinds.distributed_case import DistributedCase


def run_with_error(case: Case, wrong: int, change: str) -> str:
    """One rank calls the op with something else; what every rank then says."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layout = case.layout_of(ranks)
    q, k, v, _ = (layout.shard(t, rank) for t in case.tensors())
    where: dict[str, Any] = {"process_group": list(range(ranks))}
    if rank == wrong:
        match change:
            case "dtype":
                q, k, v = q.float(), k.float(), v.float()
            case "shorter":
                q, k, v = (t[:, 1:] for t in (q, k, v))
            case "k heads":
                k = torch.cat([k, k[:, :, :1]], 2)
            case "window":
                where["window_size"] = (3, -1)
            case "dropout":
                where["dropout_p"] = 1.5
    try:
        DENSE_OPS[case.op](q, k, v, **where)
    except (ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def run_with_error_by_default(case: Case, wrong: int, change: str) -> str:
    """The same where nobody said whether ranks compare their calls."""
    with mock.patch.dict(os.environ):
        del os.environ["SEQSHARD_CHECK"]
        return run_with_error(case, wrong, change)


def on_fake_tensors() -> torch.Size:
    """The shape of a call's result where tensors have no values, as tools that estimate memory
    call a model; ranks compare such calls too."""
    with FakeTensorMode():
        q = torch.randn(1, 16, 2, 8, requires_grad=True)
        return wrap_ring_attn_func(q, q, q, process_group=dist.group.WORLD).shape


def run_cases(cases: Sequence[DistributedCase]) -> list[list[torch.Tensor]]:
    """Of each case, what this rank of the world computes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return [case.run_rank(rank, ranks, dist.group.WORLD) for case in cases]


def run_outside() -> None:
    """Every rank names a group that rank 0 is not in; only rank 0 gets as far as a call."""
    if dist.get_rank() == 0:
        run_rank(Case("ring", 8), 0, 2, [1, 2])


def one_fails(seconds: float) -> None:
    """Rank 0 fails, while the others do something for so long."""
    if dist.get_rank() == 0:
        raise RuntimeError("not today")
    time.sleep(seconds)


def heads_by_rank() -> str:
    """What a rank is told whose group's ranks hold different heads of one sequence."""
    rank = dist.get_rank()
    q, k = torch.randn(1, 8, 2, 4), torch.randn(1, 8, 4, 4)
    try:
        wrap_ring_attn_func(q, k, k, q_heads=(rank, 2), process_group=dist.group.WORLD)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def compiled(q: torch.Tensor) -> torch.Tensor:
    """A compiled function that calls an op over the whole world; this rank's rows."""
    rank, ranks = dist.get_rank(), dist.get_world_size()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(x: torch.Tensor) -> torch.Tensor:
        return wrap_ring_attn_func(x, x, x, process_group=dist.group.WORLD) * 2

    return call(q.chunk(ranks, 1)[rank].contiguous())
