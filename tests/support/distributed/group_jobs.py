"""Calls with groups that leave a rank out; see ``ranks.Pool``."""

from __future__ import annotations

import torch
import torch.distributed as dist

from customized_ops.ring_attention import GroupError, wrap_ring_attn_func


def outside() -> str:
    """What a call says on this rank, with a group that ``new_group`` made for the others."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    made = [dist.new_group([n for n in ranks if n != left_out]) for left_out in ranks]
    q = torch.zeros(1, 4, 2, 8)
    try:
        wrap_ring_attn_func(q, q, q, process_group=made[rank])
    except GroupError as error:
        return str(error)
    return "nothing"
