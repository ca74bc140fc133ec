"""Cases of the attention ops, and how a rank runs one; for in-process and for real ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from customized_ops.ring_attention import (
    AttnMask,
    Layout,
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
    wrap_zigzag_attn_func,
)
from customized_ops.ring_attention.core.groups import group_name
from customized_ops.ring_attention.ring_attn import RING_ATTN
from customized_ops.ring_attention.zigzag_attn import ZIGZAG_ATTN

GRAPH_OPS = {"ring": RING_ATTN, "zigzag": ZIGZAG_ATTN}
DENSE_OPS = {"ring": wrap_ring_attn_func, "zigzag": wrap_zigzag_attn_func}


@dataclass(frozen=True)
class Case:
    """One call of an op on one global problem.

    Attributes:
        op: ring, zigzag or varlen. cu_seqlens: documents, varlen only.
        sizes: tokens per rank, None for an even or DTensor-like split.
        strided: q, k, v with a head dim that is not dense. fused: views of one tensor.
    """

    op: str
    length: int
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    heads: tuple[int, int] = (4, 4)
    batch: int = 1
    dims: tuple[int, int] = (8, 8)
    cu_seqlens: tuple[int, ...] = ()
    sizes: tuple[int, ...] | None = None
    layout: str | None = None
    dtype: torch.dtype = torch.float64
    strided: bool = False
    fused: bool = False
    seed: int = 0
    device: str = "cpu"

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Whole q, k, v and the gradient of out: [b, l, h, d], or [l, h, d] if packed."""
        g = torch.Generator().manual_seed(self.seed)

        def made(heads: int, dim: int) -> Tensor:
            lead = (self.length,) if self.op == "varlen" else (self.batch, self.length)
            x = torch.randn((*lead, heads, dim), generator=g, dtype=torch.float64)
            return x.to(self.dtype).to(self.device)

        (h, k), (d, e) = self.heads, self.dims
        return made(h, d), made(k, d), made(k, e), made(h, e)

    def mask(self) -> AttnMask:
        """Which pairs attend."""
        if self.op == "varlen":
            return AttnMask.varlen(self.cu_seqlens, causal=self.causal, window=self.window)
        return AttnMask.dense(self.length, causal=self.causal, window=self.window)

    def layout_of(self, ranks: int) -> Layout:
        """Where the tokens lie."""
        if self.layout == "zigzag":
            return Layout.zigzag(self.length, ranks)
        if self.sizes is not None:
            assert sum(self.sizes) == self.length and len(self.sizes) == ranks
            return Layout.from_sizes(self.sizes)
        return Layout.contiguous(self.length, ranks)

    def call(self, q: Tensor, k: Tensor, v: Tensor, **where: Any) -> Any:
        """The public op on local tensors; out and lse.

        The dense functions return no lse, so it is taken from the op below them, whose out must be
        the same bit for bit.
        """
        if self.op != "varlen":
            op = DENSE_OPS[self.op]
            out = op(q, k, v, causal=self.causal, window_size=self.window, **where)
            layout, group = where.get("layout"), group_name(where.get("process_group"))
            spec, kernel = "" if layout is None else layout.spec, where.get("kernel", "auto")
            scale = q.shape[-1] ** -0.5
            below = GRAPH_OPS[self.op]
            again, lse = below(q, k, v, scale, self.causal, *self.window, kernel, spec, group)
            assert torch.equal(out, again)
            return out, lse
        return wrap_ring_attn_varlen_func(
            q,
            k,
            v,
            list(self.cu_seqlens),
            torch.tensor(self.cu_seqlens, dtype=torch.int32),
            causal=self.causal,
            window_size=self.window,
            return_lse=True,
            **where,
        )


def run_rank(case: Case, rank: int, ranks: int, group: Any) -> list[Tensor]:
    """What one rank computes: out, lse, dq, dk, dv of its shard."""
    layout, dim = case.layout_of(ranks), 0 if case.op == "varlen" else 1
    q, k, v, dout = (layout.shard(t, rank, dim) for t in case.tensors())
    if case.strided:
        q, k, v = (t.transpose(-2, -1).contiguous().transpose(-2, -1) for t in (q, k, v))
    if case.fused:
        sizes = [t.shape[-2] for t in (q, k, v)]
        q, k, v = torch.cat([q, k, v], -2).split(sizes, -2)
        assert not q.is_contiguous() or q.numel() == 0 or k.numel() == 0
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    even = len(set(layout.sizes)) == 1 and case.layout is None
    where = {} if even or (case.op == "varlen" and case.sizes is None) else {"layout": layout}
    out, lse = case.call(q, k, v, process_group=group, **where)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    return [t.detach() for t in (out, lse, *grads)]


def gather(case: Case, per_rank: list[list[Tensor]]) -> list[Tensor]:
    """Whole results from every rank's."""
    layout = case.layout_of(len(per_rank))
    tokens = 0 if case.op == "varlen" else 1
    dims = (tokens, 1 if case.op == "varlen" else 2, tokens, tokens, tokens)
    return [layout.unshard([r[n] for r in per_rank], dim) for n, dim in enumerate(dims)]


def expected(case: Case) -> list[Tensor]:
    """The same from dense attention on one device."""
    from dense import dense_attention

    q, k, v, dout = case.tensors()
    packed = case.op == "varlen"
    q, k, v, dout = ((t.unsqueeze(0) if packed else t).double().cpu() for t in (q, k, v, dout))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out, lse = dense_attention(q, k, v, case.mask(), q.shape[-1] ** -0.5)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    return [(t.squeeze(0) if packed else t).detach() for t in (out, lse, *grads)]


PACKED = dict(length=45, cu_seqlens=(0, 7, 7, 8, 30, 45))

TABLE = {
    "causal": Case("ring", 32),
    "full": Case("ring", 32, causal=False),
    "window": Case("ring", 32, causal=False, window=(5, 2)),
    "causal window": Case("ring", 32, window=(9, -1)),
    "grouped 4:1": Case("ring", 32, heads=(8, 2)),
    "one key head": Case("ring", 32, heads=(6, 1)),
    "batch 3": Case("ring", 24, batch=3),
    "odd length": Case("ring", 37, sizes=None),
    "fewer tokens than ranks": Case("ring", 3),
    "one token": Case("ring", 1),
    "v wider": Case("ring", 32, dims=(8, 12)),
    "v narrower": Case("ring", 32, dims=(8, 3)),
    "strided inputs": Case("ring", 32, heads=(4, 2), strided=True),
    "zigzag": Case("zigzag", 32),
    "zigzag full": Case("zigzag", 32, causal=False),
    "zigzag window": Case("zigzag", 33, window=(6, 0)),
    "zigzag one key head": Case("zigzag", 32, heads=(6, 1)),
    "zigzag two-sided window": Case("zigzag", 29, causal=False, window=(4, 3)),
    "zigzag strided": Case("zigzag", 24, heads=(4, 2), strided=True, batch=2),
    "fused qkv": Case("ring", 24, heads=(4, 2), fused=True, batch=2),
    "packed fused qkv": Case("varlen", heads=(4, 2), fused=True, **PACKED),
    "zigzag odd, grouped": Case("zigzag", 37, heads=(8, 2), batch=3),
    "zigzag laid out so": Case("zigzag", 37, layout="zigzag"),
    "packed": Case("varlen", **PACKED),
    "packed full": Case("varlen", causal=False, **PACKED),
    "packed window": Case("varlen", window=(4, -1), **PACKED),
    "packed grouped": Case("varlen", heads=(8, 2), **PACKED),
    "packed strided": Case("varlen", heads=(4, 1), strided=True, **PACKED),
    "packed, one document": Case("varlen", 16, cu_seqlens=(0, 16)),
    "packed, tokens alone": Case("varlen", 6, cu_seqlens=tuple(range(7))),
    "packed, empty ends": Case("varlen", 9, cu_seqlens=(0, 0, 9, 9, 9)),
}

UNEVEN = {
    2: {
        "uneven": Case("ring", 20, sizes=(13, 7), heads=(4, 2)),
        "empty rank": Case("ring", 20, sizes=(0, 20)),
        "zigzag uneven": Case("zigzag", 20, sizes=(3, 17)),
        "packed uneven": replace(TABLE["packed"], sizes=(44, 1)),
    },
    4: {
        "uneven": Case("ring", 20, sizes=(13, 0, 2, 5), heads=(4, 2)),
        "empty ranks": Case("ring", 20, sizes=(0, 0, 20, 0), batch=2),
        "zigzag uneven": Case("zigzag", 20, sizes=(3, 10, 6, 1)),
        "packed uneven": replace(TABLE["packed"], sizes=(1, 30, 0, 14)),
    },
}
