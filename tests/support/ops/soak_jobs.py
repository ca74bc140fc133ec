"""A training whose every batch has new lengths, and what it holds on to; see ``ranks.Pool``."""

from __future__ import annotations

import gc
import resource
import tracemalloc
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rank_groups import device

from customized_ops.ring_attention import packed_batches, wrap_ring_attn_varlen_func

TOKENS, HEADS, DIM = 256, (4, 2), 16


def documents(steps: int) -> Any:
    """Lengths that no batch has twice."""
    draw = np.random.default_rng(0)
    for _ in range(steps):
        cuts = np.sort(draw.integers(0, TOKENS + 1, draw.integers(1, 12)))
        lengths = np.diff(np.concatenate([[0], cuts, [TOKENS]]))
        yield [np.zeros(n, np.int64) for n in lengths]


def held() -> tuple[int, int, int]:
    """Bytes of Python's and numpy's on the host, bytes on the GPU, and KiB that the process has had
    at most."""
    gc.collect()
    on_gpu = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return tracemalloc.get_traced_memory()[0], on_gpu, most


def soak(steps: int) -> list[tuple[int, int, int]]:
    """What is held after half of the steps, which fill every cache, and at the end."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    tracemalloc.start()
    found = []
    batches = packed_batches(documents(steps), ranks=ranks, rank=rank, heads=HEADS)
    for n, batch in enumerate(batches, 1):
        q, k, v = (
            torch.ones(len(batch.tokens), heads, DIM, dtype=dtype, device=device())
            for heads in (HEADS[0], HEADS[1], HEADS[1])
        )
        q.requires_grad_()
        cu = batch.cu_seqlens
        where = {"layout": batch.layout, "process_group": dist.group.WORLD}
        out = wrap_ring_attn_varlen_func(q, k, v, cu, cu, causal=True, **where)
        out.square().sum().backward()
        if n in (steps // 2, steps):
            found.append(held())
    tracemalloc.stop()
    return found
