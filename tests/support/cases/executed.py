"""Plans executed on in-process ranks, against dense attention over the whole sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from dense import assert_same, dense_gradients
from torch import Tensor

from customized_ops.ring_attention.core.comm import Comm
from customized_ops.ring_attention.core.comm.inprocess import run_ranks
from customized_ops.ring_attention.core.kernels import (
    KERNELS,
    BackwardOperands,
    ForwardOperands,
    Scoring,
)
from customized_ops.ring_attention.core.kernels.protocol.scoring import keep
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import Plan
from customized_ops.ring_attention.core.run.executor import attention_backward, attention_forward

NAMES = ("out", "lse", "dq", "dk", "dv")
SCALE = 0.4
PLAIN = Scoring(SCALE)


@dataclass(frozen=True)
class Shape:
    """Sizes beside the sequence's."""

    batch: int = 2
    q_heads: int = 4
    kv_heads: int = 2
    d: int = 4
    e: int = 3

    @property
    def heads(self) -> tuple[int, int]:
        """As make_plan takes them."""
        return self.q_heads, self.kv_heads

    def draw(self, mask: AttnMask, seed: int = 0) -> list[Tensor]:
        """q, k, v, dout, Gaussian, fp64."""
        source = torch.Generator().manual_seed(seed)
        sizes = [
            (mask.q_len, self.q_heads, self.d),
            (mask.k_len, self.kv_heads, self.d),
            (mask.k_len, self.kv_heads, self.e),
            (mask.q_len, self.q_heads, self.e),
        ]
        return [
            torch.randn((self.batch, *size), dtype=torch.float64, generator=source)
            for size in sizes
        ]


@dataclass(frozen=True)
class Traffic:
    """Bytes that each rank sent and received, [P, 2] as Plan.forward_bytes."""

    forward: list[list[int]]
    backward: list[list[int]]


def counted(comm: Comm) -> np.ndarray:
    return np.array([comm.counters.sent_bytes, comm.counters.received_bytes])


def run(
    plan: Plan,
    tensors: list[Tensor],
    kernel: str = "torch",
    strides=lambda t: t,
    scoring: Scoring = PLAIN,
    key_positions: Tensor | None = None,
):
    """(out, lse, dq, dk, dv) of the whole sequence, and the ranks' traffic.

    ``strides`` is applied to each rank's own tensors.
    """
    q, k, v, dout = tensors
    chosen = KERNELS[kernel]

    def body(comm: Comm):
        mine = [plan.q_layout.shard(q, comm.rank)]
        mine += [plan.k_layout.shard(t, comm.rank) for t in (k, v)]
        mine = [strides(t) for t in mine]
        own_dout = strides(plan.q_layout.shard(dout, comm.rank))
        out, lse = attention_forward(
            plan, comm, chosen, ForwardOperands(*mine), scoring, key_positions
        )
        forward = counted(comm)
        gradients = attention_backward(
            plan,
            comm,
            chosen,
            BackwardOperands(own_dout, *mine, out, lse),
            scoring,
            key_positions,
        )
        backward = counted(comm) - forward
        return (out, lse, *gradients), forward.tolist(), backward.tolist()

    results, forward, backward = zip(*run_ranks(plan.group_size, body), strict=True)
    layouts = (plan.q_layout, plan.q_layout, plan.q_layout, plan.k_layout, plan.k_layout)
    dims = (1, 2, 1, 1, 1)
    shards = zip(*results, strict=True)
    whole = [
        layout.unshard(parts, dim) for layout, parts, dim in zip(layouts, shards, dims, strict=True)
    ]
    return whole, Traffic(list(forward), list(backward))


def dense_options(
    scoring: Scoring, mask: AttnMask, q: Tensor, key_positions: Tensor | None
) -> dict[str, object]:
    """The scoring as dense_attention's keywords; dropout's mask made for the whole at once."""
    options: dict[str, object] = {
        "softcap": scoring.softcap,
        "alibi_slopes": scoring.alibi_slopes,
        "key_positions": key_positions,
    }
    if key_positions is None:  # the ends of the two sequences are one place
        options["key_positions"] = torch.arange(mask.k_len) + mask.q_len - mask.k_len
    if scoring.dropout_p:
        rows, keys = torch.arange(mask.q_len), torch.arange(mask.k_len)
        batch, _, heads, _ = q.shape
        assert scoring.dropout_seed is not None
        options["dropout_p"] = scoring.dropout_p
        options["keep"] = keep(
            scoring.dropout_seed, scoring.dropout_p, rows, keys, 0, heads, 0, batch
        )
    return options


def check(
    plan: Plan,
    tensors: list[Tensor],
    scoring: Scoring = PLAIN,
    key_positions: Tensor | None = None,
    **options,
) -> None:
    got, _ = run(plan, tensors, scoring=scoring, key_positions=key_positions, **options)
    q, k, v, dout = tensors
    asked = dense_options(scoring, plan.mask, q, key_positions)
    want = dense_gradients(q, k, v, plan.mask, scoring.softmax_scale, dout, **asked)
    for name, *values in zip(NAMES, got, want, strict=True):
        assert_same(name, *values)


# Strides that a rank's tensors may have; the last one has a sparse last dim.
STRIDES = {
    "as they come": lambda t: t,
    "heads outside tokens": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a wider tensor": lambda t: torch.cat([t, t], dim=-1)[..., t.shape[-1] :],
    "tokens innermost": lambda t: t.transpose(1, 3).contiguous().transpose(1, 3),
}


N = 24
MASKS = {
    "full": AttnMask.dense(N),
    "causal": AttnMask.dense(N, causal=True),
    "window": AttnMask.dense(N, window=(4, 2)),
    "causal window": AttnMask.dense(N, causal=True, window=(5, 0)),
    "packed": AttnMask.varlen([0, 5, 5, 6, 17, 24, 24], causal=True),
    "packed window": AttnMask.varlen([0, 9, 24], window=(2, 1)),
    "sink": AttnMask.from_slices([(0, N, 0, 2, -N, 0), (0, N, 2, N, -3, 0)], N, N),
    "rows with no key": AttnMask.from_slices([(3, 9, 12, 20, -N, N), (20, 22, 0, 1, -N, N)], N, N),
    "nothing": AttnMask.from_slices([], N, N),
    "cross": AttnMask.dense(N, 40, causal=True),
    "cross, fewer keys": AttnMask.dense(N, 10, causal=True),
    "one token": AttnMask.dense(1, causal=True),
}
LAYOUTS = {
    "one rank": lambda total: Layout.contiguous(total, 1),
    "contiguous 2": lambda total: Layout.contiguous(total, 2),
    "contiguous 5": lambda total: Layout.contiguous(total, 5),
    "zigzag 3": lambda total: Layout.zigzag(total, 3),
    "zigzag 8": lambda total: Layout.zigzag(total, 8),
    "uneven": lambda total: Layout.from_sizes([0, total - total // 4, 0, total // 4]),
}
