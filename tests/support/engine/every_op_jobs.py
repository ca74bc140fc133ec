"""A model with any of the ops, and jobs that cut it; see ``ranks.Pool``."""

from __future__ import annotations

from typing import Any

import dtensor_jobs
import torch
import torch.distributed as dist
from steps import over_all, refusal, step
from torch import Tensor, nn

from annotations import ComputeConfig, parallelize
from customized_ops.ring_attention import (
    AttnMask,
    wrap_masked_attn_func,
    wrap_maybe_shuffle,
    wrap_maybe_unshuffle,
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
    wrap_roll_func,
    wrap_shard_func,
    wrap_shuffle_func,
    wrap_sliding_window_attn_func,
    wrap_streaming_attn_func,
    wrap_unshard_func,
)


class EveryOp(nn.Module):
    """One of the newer ops with a learnable sink, and in what the ops differ."""

    def __init__(self, op: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.op = op
        self.project = nn.Linear(16, 48).double()
        self.sink = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.mask = AttnMask.streaming(24, 5, 2)

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        q, k, v = self.project(x).view(*x.shape[:-1], 12, 4).split(4, -2)
        given: dict[str, Any] = {"softcap": 3.0, "sink": self.sink}
        given |= {"deterministic": True, "reduce_dtype": torch.float64}
        match self.op:
            case "masked":
                out = wrap_masked_attn_func(q, k, v, self.mask, **given)
            case "dropout":
                out = wrap_ring_attn_func(q, k, v, dropout_p=0.4, dropout_seed=5, **given)
            case "window":
                out = wrap_sliding_window_attn_func(q, k, v, window_size=(6, 0), **given)
            case "packed window":
                cu = (cu_seqlens, cu_seqlens)
                out = wrap_sliding_window_attn_func(q, k, v, *cu, window_size=(6, 0), **given)
            case "streaming":
                out = wrap_streaming_attn_func(q, k, v, 4, 2, **given)
            case "shuffled":
                # Zigzag in the middle of the model: only attention is told.
                q, k, v = (wrap_maybe_shuffle(t, cu_seqlens) for t in (q, k, v))
                q, k, v = (wrap_maybe_unshuffle(t, cu_seqlens) for t in (q, k, v))
                out = wrap_ring_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, **given)
            case "rolled":
                out = wrap_ring_attn_func(q, k, wrap_roll_func(v, -1), **given)
            case "rolled uneven":
                out = wrap_ring_attn_func(q, wrap_roll_func(k, 3), wrap_roll_func(v, -4), **given)
            case "sharded":
                q, k, v = (wrap_shard_func(t, "zigzag") for t in (q, k, v))
                v = wrap_roll_func(v, 5, "zigzag")
                q, k, v = (wrap_unshard_func(t, "zigzag") for t in (q, k, v))
                out = wrap_ring_attn_func(q, k, v, **given)
            case "named uneven":
                q, k, v = (wrap_shuffle_func(t, "zigzag") for t in (q, k, v))
                out = wrap_ring_attn_func(q, k, v, **given)
        return out.square().sum()


# Tracing takes longer than all else: not every op is run so.
LOWERED = ("masked", "dropout", "packed window", "rolled uneven", "sharded")


def every_op_inputs(op: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    shape = (24, 16) if op in ("packed window", "shuffled") else (2, 24, 16)
    if op in ("rolled uneven", "named uneven"):
        shape = (2, 7, 16)
    cu_seqlens = torch.tensor([0, 8, 24], dtype=torch.int32)
    return {"x": torch.randn(shape, dtype=torch.float64), "cu_seqlens": cu_seqlens}


def every_op(op: str) -> tuple[float, dict[str, Tensor]]:
    """One step of a model with one of the newer ops, cut over all ranks."""
    given = every_op_inputs(op)
    parallel = parallelize(EveryOp(op), given, "cp", over_all(), lowered=op in LOWERED)
    assert "l / 2" in str(parallel.plan)
    return step(parallel, given)


class PartsOfQ(nn.Module):
    """Six heads of q to two of k, with a learnable sink, and a loss of out and lse."""

    def __init__(self, what: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.what = what
        self.project = nn.Linear(16, 40).double()
        self.sink = nn.Parameter(torch.randn(6, dtype=torch.float64))
        self.slopes: Tensor
        self.register_buffer("slopes", torch.linspace(0.1, 0.6, 6))

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        q, k, v = self.project(x).view(*x.shape[:-1], 10, 4).split([6, 2, 2], -2)
        given: dict[str, Any] = {"return_lse": True, "sink": self.sink, "alibi_slopes": self.slopes}
        match self.what:
            case "heads":
                out, lse = wrap_ring_attn_func(q, k, v, **given)
            case "rows":
                out, lse = wrap_ring_attn_func(q, k, v, q_rows=(0, 1), **given)
            case "packed rows":
                cu = (cu_seqlens, cu_seqlens)
                out, lse = wrap_ring_attn_varlen_func(q, k, v, *cu, q_rows=(0, 1), **given)
            case "rows of a cross attention":
                mask = AttnMask.causal(9, x.shape[1])
                out, lse = wrap_masked_attn_func(q[:, :9] * 1.0, k, v, mask, **given)
        return out.square().sum() + lse.square().sum()


def parts_of_q_inputs(what: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    shape = (22, 16) if what == "packed rows" else (2, 22, 16)
    cu_seqlens = torch.tensor([0, 8, 22], dtype=torch.int32)
    return {"x": torch.randn(shape, dtype=torch.float64), "cu_seqlens": cu_seqlens}


def parts_of_q(what: str, policy: Any) -> tuple[float, dict[str, Tensor], str]:
    """One step over all ranks: loss, gradients after sync, the plan's text."""
    given = parts_of_q_inputs(what)
    parallel = parallelize(PartsOfQ(what), given, policy, over_all(), lowered=what == "rows")
    return *step(parallel, given), str(parallel.plan)


def heads_of_q(ops: Any, config: ComputeConfig) -> dict[str, str]:
    """A policy: the heads of q, more than those of k where there are more ranks than these."""
    (attention,) = ops
    cut = ("b", "l", "g", "qh") if config.plan_ngpus == 2 else ("l", "qh")
    assert attention.splits == cut
    return {attention.name: "qh"}


def named_layout_of_uneven_shards() -> str:
    """What this rank is told; then both ranks must still be able to talk."""
    said = refusal(every_op, "named uneven")
    dist.barrier()
    return said


class Means(nn.Module):
    """An op with a result that its communicating split leaves whole, and a loss of some."""

    def __init__(self, op: str, used: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.op, self.used = op, used
        self.project = nn.Linear(4, 3).double()
        self.gain = nn.Parameter(torch.rand(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x)
        op = dtensor_jobs.OPS[self.op]
        results = (op(y),) if self.op == "mean" else op(y, self.gain)
        return sum((results[n] - 0.5 * self.gain).pow(2).sum() for n in self.used)


def means_inputs() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(2, 5, 4, dtype=torch.float64)}


def means(op: str, used: tuple[int, ...]) -> tuple[float, dict[str, Tensor], Tensor]:
    """One step over all ranks, cut on tokens: loss, gradients after sync, and of the input."""
    given = means_inputs()
    parallel = parallelize(Means(op, used), given, "cp", over_all(), lowered=used == (0, 1))
    assert f"l / {dist.get_world_size()}" in str(parallel.plan)
    given["x"].requires_grad_()
    return *step(parallel, given), given["x"].grad


class ShardedAndRolled(nn.Module):
    """Layout ops alone: each can be cut, and what they do shows in the result."""

    def forward(self, x: Tensor) -> Tensor:
        x = wrap_shard_func(x * 1.0, "zigzag")
        return wrap_unshard_func(wrap_roll_func(x, -3, "zigzag"), "zigzag")


def layout_ops_alone() -> tuple[str, Tensor, Tensor]:
    """The plan, the result and the gradient of the model's input."""
    x = torch.arange(2 * 24 * 3, dtype=torch.float64).view(2, 24, 3)
    parallel = parallelize(ShardedAndRolled(), {"x": x}, "cp", ComputeConfig(2, 2))
    leaf = x.clone().requires_grad_()
    result = parallel(x=leaf)
    (result * torch.cos(x)).sum().backward()
    return str(parallel.plan), result.detach(), leaf.grad
