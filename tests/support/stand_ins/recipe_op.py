"""Ops as CONTRIBUTING's recipe says to add them: an attention op, and two others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from op_cases import Case
from torch import Tensor
from typing_extensions import Unpack

from annotations import Communicates, InnerCost, PartitionRule, register_op
from customized_ops.ring_attention import AttnMask
from customized_ops.ring_attention.core.comm.comm_groups import GroupLike, comm_by_name
from customized_ops.ring_attention.op.documentation import attention_function
from customized_ops.ring_attention.op.eager import attend
from customized_ops.ring_attention.op.graph import declare
from customized_ops.ring_attention.op.mask_source import Arguments, MaskSource, Problem, Shards
from customized_ops.ring_attention.op.options import SharedOptions
from customized_ops.ring_attention.op.tokens.call_layouts import layout_of

# 1. Attention of each block of tokens to itself and to those before it.


@dataclass(frozen=True, slots=True)
class Blocks(MaskSource):
    """Which pairs attend, from one number."""

    block: int

    same_length: ClassVar[bool] = True
    numbers: ClassVar[Mapping[str, type]] = {"block": int}

    def key(self) -> Any:
        """The number, and its type."""
        return type(self.block), self.block

    def encode(self, op: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """As the op has it."""
        return {}, {"block": self.block}

    @classmethod
    def decode(cls, given: Arguments) -> Blocks:
        """From the op."""
        return cls(given["block"])

    def mask(self, q_len: int, k_len: int) -> AttnMask:
        """Over so many tokens."""
        return AttnMask.block_causal(q_len, self.block)

    def problem(self, op: str, shards: Shards) -> Problem:
        """With the layout of its tokens."""
        layout = layout_of(op, shards.comm, "layout", shards.layout, shards.rows, None)
        return Problem(self.mask(layout.total, layout.total), layout, layout)


BLOCK_ATTN = declare(Blocks, "recipes::block_attn", "wrap_block_attn_func")


@attention_function
def wrap_block_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: int,
    process_group: GroupLike = None,
    *,
    return_lse: bool = False,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    **options: Unpack[SharedOptions],
) -> Any:
    """``b l (g n) hd^, b l g hd^, b l g vd^ -> b l (g n) vd^``

    Args:
        block: tokens of one.
    Returns:
        As q.
    """
    return attend(
        BLOCK_ATTN,
        q,
        k,
        v,
        Blocks(block),
        process_group,
        (alibi_slopes, None, dropout_p, False, return_lse),
        options,
    )


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
