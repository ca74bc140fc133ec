"""Jobs for the distributed op tests; see ``ranks.Pool``."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from op_cases import Case, run_rank

from customized_ops.ring_attention import attention_op
from customized_ops.ring_attention.core.plan import make_plan

_groups: dict[tuple[int, ...], Any] = {}


def run_cases(cases: list[Case], members: tuple[int, ...], as_group: bool) -> Any:
    """Run cases on the ranks ``members``; None on the others.

    The group is passed as the ranks themselves, or made here by all ranks and passed as a group.
    """
    if as_group and members not in _groups:
        _groups[members] = dist.new_group(list(members))
    if dist.get_rank() not in members:
        return None
    group = _groups[members] if as_group else list(members)
    rank = members.index(dist.get_rank())
    per_case = [run_rank(case, rank, len(members), group) for case in cases]
    return [[t.cpu() for t in results] for results in per_case]


def run_in_teams(cases: list[Case], team_size: int) -> Any:
    """Run cases on all ranks, heads split ``team_size`` ways though it may not be the fastest."""

    def plan(*args: Any, **options: Any) -> Any:
        return make_plan(*args, **{**options, "team_size": team_size})

    with patch.object(attention_op, "make_plan", plan):
        return run_cases(cases, tuple(range(dist.get_world_size())), as_group=False)


def run_two_groups(case: Case, first: int) -> Any:
    """Ranks [0, 1] and [2, 3] at once, each its own problem; ``first`` is who asks late."""
    import time

    rank = dist.get_rank()
    members = (0, 1) if rank < 2 else (2, 3)
    if rank == first:
        time.sleep(0.3)
    return run_rank(case, members.index(rank), 2, members)


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
        case_op = __import__("op_cases").DENSE_OPS[case.op]
        case_op(q, k, v, **where)
    except (ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def run_outside() -> None:
    """Every rank names a group that rank 0 is not in; only rank 0 gets as far as a call."""
    if dist.get_rank() == 0:
        run_rank(Case("ring", 8), 0, 2, [1, 2])


def heads_by_rank() -> str:
    """What a rank is told whose group's ranks hold different heads of one sequence."""
    from customized_ops.ring_attention import wrap_ring_attn_func

    rank = dist.get_rank()
    q, k = torch.randn(1, 8, 2, 4), torch.randn(1, 8, 4, 4)
    try:
        wrap_ring_attn_func(q, k, k, q_heads=(rank, 2), process_group=dist.group.WORLD)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def compiled(q: torch.Tensor) -> torch.Tensor:
    """A compiled function that calls an op over the whole world; this rank's rows."""
    from customized_ops.ring_attention import wrap_ring_attn_func

    rank, ranks = dist.get_rank(), dist.get_world_size()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(x: torch.Tensor) -> torch.Tensor:
        return wrap_ring_attn_func(x, x, x, process_group=dist.group.WORLD) * 2

    return call(q.chunk(ranks, 1)[rank].contiguous())
