"""A job whose every call has new lengths; see ``ranks.Pool``."""

from __future__ import annotations

import time
import warnings

import torch
import torch.distributed as dist
from rank_groups import device

from customized_ops.ring_attention import wrap_ring_attn_varlen_func
from customized_ops.ring_attention.op.bound import LAST_PLANS as LAST


def new_lengths(calls: int) -> list[str]:
    """What is said of attention over a few tokens, which takes no longer than its plan, in calls
    of more than a second in all."""
    size = dist.get_world_size()
    q = torch.randn(40, 2, 8, device=device())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in range(calls):
            time.sleep(1.1 / LAST)
            ends = sorted([0, 1 + n % 39, 40 + n // 39, 40 * size])
            wrap_ring_attn_varlen_func(q, q, q, ends, ends, process_group=dist.group.WORLD)
    return [str(warning.message) for warning in caught]
