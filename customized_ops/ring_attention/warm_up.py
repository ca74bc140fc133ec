"""Compiles, before the first step, all kernels that packed documents of any lengths can need.

    warm_up(tokens=32768, heads=(32, 8), head_dim=128, process_group=group)

flash-attn-4 and Triton compile a kernel at the first call of its kind, which takes seconds. Which
kinds there are depends on dtype, heads, head dims and options, not on lengths. But at any step of a
training, a document that is cut elsewhere, or a batch for which ranks share out heads, may be the
first to need one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from .core.comm import Comm
from .core.comm.comm_groups import GroupLike, group_comm
from .core.comm.dist_comm import COSTS
from .core.kernels import (
    FEATURES,
    KERNELS,
    BackwardOperands,
    ForwardOperands,
    Kernel,
    Pairs,
    Request,
    Scoring,
    choose,
)
from .core.mask import AttnMask
from .core.mask.slices import UNBOUNDED, normalise
from .core.merge import rows
from .core.plan.cost_model import H200, H200_NCCL
from .core.plan.heads import grouped_heads, head_shares
from .op.arguments import is_integer, require, window_bounds
from .packed_batches import PACKED_LAYOUTS
from .ring_attn_varlen import wrap_ring_attn_varlen_func

OP = "warm_up"
DRAWS = 16  # batches of random lengths
LONG = 2048  # tokens: no kernel has a variant for more
FREE = (-1, -1)  # window_size without a window


def compiled_kernels() -> int:
    """How many attention kernels this process has compiled so far, as far as libraries report it:
    flash-attn-4's and this package's own. A step that leaves this number the same compiled none."""
    return rows.compiled() + sum(kernel.compiled() for kernel in _compiling())


def warm_up(
    tokens: int,
    *,
    heads: tuple[int, int],
    head_dim: int,
    v_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    process_group: GroupLike = None,
    layout: str = "balanced",
    causal: bool = True,
    **options: Any,
) -> int:
    """Attend random documents, forward and backward, as the training will.

    Every rank of the group calls this, at the same point of its program. Afterwards, buffers
    between ranks are as large as batches of ``tokens`` tokens need. On GPUs, plans then also know
    what a kernel call costs the slowest host, if that is twice what they assume or more: see
    :func:`.group_costs`.

    Args:
        tokens: the tokens of a batch, on all ranks together.
        heads: query and key heads. head_dim: of q and k. v_dim: of v; None: as q and k.
        dtype: of q, k and v. device: None: the current GPU, or the CPU if there is none.
        layout: "balanced" or "contiguous", as :func:`.packed_batches` has it.
        options: further arguments of :func:`.wrap_ring_attn_varlen_func`, as the model passes them.
    Returns:
        how many kernels were compiled, see :func:`compiled_kernels`.
    Raises:
        ValueError: an argument does not fit, or the op refuses it.
    """
    heads = grouped_heads(OP, heads)
    _check(tokens, head_dim, v_dim, dtype, layout)
    window = window_bounds(OP, options.get("window_size", FREE))
    comm, before = group_comm(process_group), compiled_kernels()
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    dims = head_dim, v_dim or head_dim
    like = torch.empty(0, dtype=dtype, device=device)
    hidden = None if comm.rank == 0 else True  # None: where there is a terminal
    with tqdm(desc="warm_up", unit=" kernels", disable=hidden) as progress:
        for _ in rows.warm_up(heads[0], set(dims), like):
            progress.update()
        for bounds in _drawn(tokens):
            mask = AttnMask.varlen(bounds, causal=causal, window=window)
            where = PACKED_LAYOUTS[layout](mask, comm.size, comm.costs.topology)
            length = where.sizes[comm.rank]
            q, k, v = (
                like.new_zeros(length, *size).requires_grad_() for size in _sizes(heads, dims)
            )
            given = {"causal": causal, "process_group": process_group, "layout": where} | options
            out = wrap_ring_attn_varlen_func(q, k, v, bounds.tolist(), bounds.tolist(), **given)
            outs = out if isinstance(out, tuple) else (out,)
            torch.autograd.backward(outs, [torch.zeros_like(each) for each in outs])
        # Kernels that were called also compile what documents of other lengths would need.
        for kernel in _compiling():
            each = shares(heads, comm.size, comm.rank, options.get("team_size"))
            for mine in each if kernel.compiled() else ():
                q, k, v = (like.new_zeros(1, LONG, *size) for size in _sizes(mine, dims))
                out, lse = v.new_zeros(*q.shape[:3], dims[1]), q.new_zeros(1, mine[0], LONG)
                dlse = lse.float() if options.get("return_lse") else None
                for _ in kernel.warm_up(
                    BackwardOperands(out, q, k, v, out, lse.float(), dlse),
                    Scoring(1.0, options.get("softcap", 0.0)),
                    window=window != FREE,
                    deterministic=options.get("deterministic", False),
                ):
                    progress.update()
        if device.type == "cuda":
            learn_costs(
                comm, [like.new_zeros(1, LONG, *size) for size in _sizes(heads, dims)], options
            )
    return compiled_kernels() - before


def learn_costs(comm: Comm, given: Sequence[torch.Tensor], options: Mapping[str, Any]) -> None:
    """Tell plans of the group what a call of attention's kernel costs its slowest host, where that
    is twice what they assume or more. Every rank calls this.

    Args:
        given: q, k and v, [1, tokens, heads, dim]. options: of attention.
    """
    with comm.doing(OP):  # peers hear of an error
        kernel = choose(OP, options.get("kernel", "auto"), _request(given, options))
        slowest = max(comm.all_gather_object(call_seconds(kernel, *given)))
    times = 2.0 ** max(math.trunc(math.log2(slowest / H200.call_seconds)), 0)
    known = H200 if comm.costs.one_sided else H200_NCCL
    of_host = ("call_seconds", "batch_seconds", "message_seconds")
    costs = replace(comm.costs, **{name: times * getattr(known, name) for name in of_host})
    comm.costs = costs.with_rates(os.environ.get(COSTS, ""), COSTS)


def call_seconds(kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    """Seconds of the host to launch the kernel over documents that it has met once before: the mean
    of a forward and a backward. q, k and v are [1, tokens, heads, dim]."""
    scoring, took = Scoring(q.shape[-1] ** -0.5), []
    for bounds in _drawn(q.shape[1]):
        slices = [(a, b, a, b, -UNBOUNDED, 0) for a, b in pairwise(bounds.tolist())]
        pairs = Pairs(normalise(np.array(slices)), q.shape[1], q.shape[1])
        for _ in range(2):
            start = perf_counter()
            out, lse = kernel.forward(ForwardOperands(q, k, v), pairs, scoring, None)
            kernel.backward(BackwardOperands(out, q, k, v, out, lse, None), pairs, scoring, None)
        took.append(perf_counter() - start)
    return float(np.median(took)) / 2


def _request(given: Sequence[torch.Tensor], options: Mapping[str, Any]) -> Request:
    q, k, v = given
    asked = {
        "softcap": options.get("softcap"),
        "alibi": options.get("alibi_slopes") is not None,
        "dropout": options.get("dropout_p"),
        "window": tuple(options.get("window_size", FREE)) != FREE,
        "lse gradient": options.get("return_lse"),
        "deterministic": options.get("deterministic"),
    }
    sizes = q.shape[-1], v.shape[-1], q.shape[2], k.shape[2]
    features = tuple(name for name in FEATURES if asked.get(name))
    kind = "window" if asked["window"] else "packed"
    return Request(q.device, q.dtype, *sizes, features, shape_class=kind, tokens=q.shape[1])


def _check(tokens: int, head_dim: int, v_dim: int | None, dtype: torch.dtype, layout: str) -> None:
    require(is_integer(tokens, 1), OP, "tokens", "a number of tokens, 1 or more", tokens)
    require(is_integer(head_dim, 1), OP, "head_dim", "1 or more", head_dim)
    require(v_dim is None or is_integer(v_dim, 1), OP, "v_dim", "1 or more, or None", v_dim)
    floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    require(floating, OP, "dtype", "a floating torch.dtype", dtype)
    names = tuple(PACKED_LAYOUTS)
    require(layout in names, OP, "layout", f"one of {names}", layout)


def shares(
    heads: tuple[int, int], ranks: int, rank: int, team_size: int | None
) -> list[tuple[int, int]]:
    """Query and key heads of a rank's kernel calls: one pair for each number of query heads per key
    head, because kernels are compiled for that number. Lengths decide in which teams ranks share
    out heads, and a team of more ranks than key heads splits the query heads of one key head."""
    fit = [n for n in range(1, min(ranks, heads[0]) + 1) if ranks % n == 0]
    each = [head_shares(*heads, n)[rank % n] for n in ([team_size] if team_size else fit)]
    of_ratio = {share.q_heads // share.kv_heads: share for share in reversed(each)}
    return [(share.q_heads, share.kv_heads) for share in of_ratio.values()]


def _sizes(heads: tuple[int, int], dims: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """Heads and head dims of q, k and v."""
    return (heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1])


def _drawn(tokens: int) -> Iterator[np.ndarray[Any, Any]]:
    """Bounds of documents, the same on every rank, from few long ones to many short ones."""
    draw = np.random.default_rng(0)
    for median in np.geomspace(max(tokens / 4, 2), max(tokens / 512, 2), DRAWS):
        lengths = np.ceil(draw.lognormal(np.log(median), 1.0, 1 + int(4 * tokens / median)))
        ends = np.cumsum(lengths).astype(int)
        yield np.concatenate([[0], ends[ends < tokens], [tokens]])


def _compiling() -> list[Any]:
    """The kernels that compile, and report it if their library was used."""
    return [kernel for kernel in KERNELS.values() if hasattr(kernel, "compiled")]
