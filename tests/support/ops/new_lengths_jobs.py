"""A job whose every call has new lengths; see ``ranks.Pool``."""

from __future__ import annotations

import warnings
from unittest import mock

import torch
import torch.distributed as dist
from rank_groups import device

from customized_ops.ring_attention import wrap_ring_attn_varlen_func
from customized_ops.ring_attention.core.plan import plans_ahead
from customized_ops.ring_attention.op import bound


def new_lengths(calls: int) -> list[str]:
    """What is said of attention over a few tokens where any planning, in any time, is too much."""
    size = dist.get_world_size()
    q = torch.randn(40, 2, 8, device=device())
    with (
        mock.patch.multiple(plans_ahead, LEAST_SECONDS=0.0, LARGEST_SHARE=0.0),
        mock.patch.object(bound, "_PLANNING", plans_ahead.PlanningShare()),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for n in range(calls):
            ends = sorted([0, 1 + n % 39, 40 + n // 39, 40 * size])
            wrap_ring_attn_varlen_func(q, q, q, ends, ends, process_group=dist.group.WORLD)
    return [str(warning.message) for warning in caught]
