"""A training whose every batch has new lengths, and what it holds on to; see ``ranks.Pool``."""

from __future__ import annotations

import functools
import gc
import resource
import sys
import tracemalloc
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import shape_jobs
import torch
import torch.distributed as dist
from rank_groups import device
from steps import over_all

from annotations import parallelize
from customized_ops.ring_attention import packed_batches, wrap_ring_attn_varlen_func
from customized_ops.ring_attention.core.plan import plans_ahead

TOKENS, HEADS, DIM = 256, (4, 2), 16
# What is held, and how much each cache holds and may hold.
Found = tuple[tuple[int, int, int], dict[str, tuple[int, int | None]]]


def documents(steps: int, seed: int) -> Iterator[list[Any]]:
    """Documents of lengths that no batch has twice; their tokens are 0, 1, 2, ..."""
    draw = np.random.default_rng(seed)
    for _ in range(steps):
        cuts = np.sort(draw.integers(0, TOKENS + 1, draw.integers(1, 12)))
        lengths = np.diff(np.concatenate([[0], cuts, [TOKENS]]))
        yield [np.arange(n) for n in lengths]


def held() -> tuple[int, int, int]:
    """Bytes of Python's and numpy's on the host, bytes on the GPU, and KiB that the process has had
    at most."""
    gc.collect()
    on_gpu = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return tracemalloc.get_traced_memory()[0], on_gpu, most


def cached() -> dict[str, tuple[int, int | None]]:
    """How much each cache of the package holds, and may hold where it says so: what modules keep
    in containers, with one level of containers in these, and what functions remember."""
    sizes: dict[str, tuple[int, int | None]] = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] not in ("annotations", "customized_ops"):
            continue
        for name, value in vars(module).items():
            if isinstance(value, WeakKeyDictionary | WeakValueDictionary):
                continue  # which keep nothing
            if isinstance(value, Mapping | list | set | deque):
                inner = list(value.values()) if isinstance(value, Mapping) else []
                count = len(value) + sum(len(x) for x in inner if isinstance(x, dict | list))
                sizes[f"{module_name}.{name}"] = count, getattr(value, "maxlen", None)
            elif isinstance(value, functools._lru_cache_wrapper):
                info = value.cache_info()
                sizes[f"{module_name}.{name}"] = info.currsize, info.maxsize
    return sizes


def trace() -> None:
    """From now on the process notes what it allocates."""
    if not tracemalloc.is_tracing():
        tracemalloc.start()


def soak(steps: int, seed: int) -> Found:
    """So many steps; what is held after them. A job of the same process goes on where one before
    ended."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    trace()
    for batch in packed_batches(documents(steps, seed), ranks=ranks, rank=rank, heads=HEADS):
        q, k, v = (
            torch.ones(len(batch.tokens), heads, DIM, dtype=dtype, device=device())
            for heads in (HEADS[0], HEADS[1], HEADS[1])
        )
        q.requires_grad_()
        cu = batch.cu_seqlens
        where = {"layout": batch.layout, "process_group": dist.group.WORLD}
        out = wrap_ring_attn_varlen_func(q, k, v, cu, cu, causal=True, **where)
        out.square().sum().backward()
    del batch, q, k, v, out
    return held(), cached()


@functools.cache
def module() -> Any:
    """One for all jobs of a process."""
    example = shape_jobs.batch([TOKENS // 4] * 4)
    return parallelize(shape_jobs.Packed(window=-1), example, "cp", over_all())


def soak_module(steps: int, seed: int) -> Found:
    """:func:`soak` of a module of the embedded engine."""
    trace()
    for each in documents(steps, seed):
        module().zero_grad()
        module()(**shape_jobs.batch([len(document) for document in each])).backward()
        module().sync_grad()
    return held(), cached()


@functools.cache
def llama() -> tuple[Any, torch.optim.Optimizer]:
    """A Hugging Face model and its optimizer, the same for all jobs of a process."""
    from hf_models import tiny  # transformers is optional

    sizes = {"vocab_size": TOKENS, "max_position_embeddings": TOKENS}
    model = tiny("llama", std=0.1, **sizes).float().to(device())
    model.set_attn_implementation("seqshard")
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batches(steps: int, seed: int, config: Any) -> Iterator[tuple[Any, str | None]]:
    """What ``shard_batch`` is given, and the layout: two of three times a batch that was planned
    ahead, else position ids that begin anew. The first job begins with a batch of one document:
    these are rare, and what they alone need would look like a leak if it came late."""
    drawn = [[np.arange(TOKENS)]] * (seed == 0) + list(documents(steps, seed))
    own = {"ranks": dist.get_world_size(), "rank": dist.get_rank()}
    heads = config.num_attention_heads, config.num_key_value_heads
    planned = [each for n, each in enumerate(drawn) if n % 3]
    ahead = packed_batches(planned, **own, heads=heads, head_dim=config.head_dim)
    for n, each in enumerate(drawn):
        if n % 3:
            yield next(ahead).to(device()), None
        else:
            ids = torch.from_numpy(np.concatenate(each))[None].to(device())
            labels = ids.masked_fill(ids == 0, -100)
            given = {"input_ids": ids, "labels": labels, "position_ids": ids}
            yield given, ("zigzag", "balanced")[n % 2]


# Python notes a warning in the module that gives it: one that comes late would look like a leak.
@mock.patch.object(plans_ahead, "LARGEST_SHARE", 1.0)
def soak_llama(steps: int, seed: int) -> Found:
    """:func:`soak` of the training of a Hugging Face model."""
    from customized_ops.ring_attention.api import transformers as seqshard

    (model, optimizer), group = llama(), dist.group.WORLD
    trace()
    for batch, layout in batches(steps, seed, model.config):
        shard = seqshard.shard_batch(batch, group, layout)
        with shard.context():
            loss = model(**shard.inputs).loss
        optimizer.zero_grad()
        loss.backward()
        seqshard.sum_gradients(model, group)
        optimizer.step()
    del batch, shard, loss
    return held(), cached()


def stop() -> None:
    """The process goes on without being traced."""
    tracemalloc.stop()
