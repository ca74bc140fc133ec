"""Ops as CONTRIBUTING's recipe says to add them: an attention op, and two others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from op_cases import Case
from torch import Tensor

from annotations import Communicates, InnerCost, PartitionRule, register_op
from customized_ops.ring_attention import AttnMask, Layout
from customized_ops.ring_attention.core.comm import Comm
from customized_ops.ring_attention.core.comm.comm_groups import GroupLike, comm_by_name
from customized_ops.ring_attention.op.arguments import Options
from customized_ops.ring_attention.op.attention_family import Arguments, Family, Problem
from customized_ops.ring_attention.op.attention_layout import layout_of
from customized_ops.ring_attention.op.attention_op import call_op, declare
from customized_ops.ring_attention.op.attention_repeat import Pattern

# 1. Attention of each block of tokens to itself and to those before it.


def block_mask(given: Arguments, q_len: int, k_len: int) -> AttnMask:
    """Which pairs attend, from the op's numbers."""
    return AttnMask.block_causal(q_len, given["block"])


def problem(title: str, given: Arguments, rows: int, comm: Comm) -> Problem:
    """Which pairs attend in a call, and where its tokens lie."""
    layout = layout_of(title, comm, "layout", given["layout"], rows, None)
    return Problem(block_mask(given, layout.total, layout.total), layout, layout)


BLOCKS = Family(
    packed=False,
    tensors={},
    numbers={"block": int},
    same_length=True,
    problem=problem,
    all_rows=lambda given: given["k"].shape[1],
    known=block_mask,
    otherwise=block_mask,
)
BLOCK_ATTN = declare(BLOCKS, "recipes::block_attn", "wrap_block_attn_func")


def wrap_block_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: int,
    process_group: GroupLike = None,
    *,
    layout: Layout | None = None,
    return_lse: bool = False,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    q_rows: tuple[int, int] | None = None,
    q_heads: tuple[int, int] | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Any:
    """``b l (g n) hd^, b l g hd^, b l g vd^ -> b l (g n) vd^``"""
    options = Options(
        softcap=softcap,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        alibi_slopes=alibi_slopes,
        sink=sink,
        return_lse=return_lse,
        layout=layout,
        reduce_dtype=reduce_dtype,
        q_rows=q_rows,
        q_heads=q_heads,
    )
    pattern = Pattern((block,), lambda: {"block": block})
    return call_op(BLOCK_ATTN, q, k, v, pattern, options, process_group)


@dataclass(frozen=True)
class BlockCase(Case):
    """A case of it, as those of ``op_table``."""

    block: int = 1

    def mask(self) -> AttnMask:
        """Which pairs attend."""
        return AttnMask.block_causal(self.length, self.block)

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None, **where: Any
    ) -> Any:
        """Out and lse."""
        return wrap_block_attn_func(
            q, k, v, self.block, softcap=self.softcap, sink=sink, return_lse=True, **where
        )


# 2. An op that any rank runs on its part.


@register_op("m k+, k+ n -> m n", name="recipes::project")
def project(x: Tensor, w: Tensor) -> Tensor:
    """A matmul."""
    return x @ w


# 3. An op that communicates inside, where l is cut.


class SumOverRanks(torch.autograd.Function):
    """Of all ranks' parts, of which every rank's result is made."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: str) -> Tensor:
        """Any shape."""
        ctx.group = group
        return comm_by_name(group).all_reduce(part.clone(), "sum")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """As many results, each of this part."""
        return SumOverRanks.apply(grad, ctx.group), None


def moved(bound: Any, site: Any, arguments: Mapping[str, Any], itemsize: int) -> InnerCost:
    """A sum for each channel, both ways."""
    sums_bytes = bound.sizes["b"] * bound.sizes["c"] * itemsize
    received = sums_bytes * 2 * (site.parts - 1) // site.parts
    return InnerCost("sums", received, received)


ALONG_L = Communicates(lambda site: {"group": site.group, "tokens": site.size}, moved)


@register_op("b l c -> b l c", name="recipes::centre", rule=PartitionRule({"l": ALONG_L}))
def centre(x: Tensor, group: str = "", tokens: int = 0) -> Tensor:
    """x less its mean over the tokens, of which all ranks have ``tokens``."""
    total = x.sum(1, keepdim=True)
    total = SumOverRanks.apply(total, group) if group else total
    return x - total / (tokens or x.shape[1])
