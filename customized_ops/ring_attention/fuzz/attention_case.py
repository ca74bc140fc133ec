"""Cases of the attention ops, and how a rank runs one; for in-process and for real ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import (
    AttnMask,
    Layout,
    wrap_masked_attn_func,
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
    wrap_sliding_window_attn_func,
    wrap_streaming_attn_func,
    wrap_zigzag_attn_func,
)
from ..core.kernels.protocol.scoring import keep
from .specification import dense_gradients

DENSE_OPS = {"ring": wrap_ring_attn_func, "zigzag": wrap_zigzag_attn_func}
PACKED_OPS = ("varlen", "packed window", "packed streaming")
SEED = 1234567890123


@dataclass(frozen=True)
class Case:
    """One call of an op on one global problem.

    Attributes:
        op: ring, zigzag, varlen, window, streaming, packed window, packed streaming or masked.
        cu_seqlens: documents, of packed ops. cu_seqlens_k: those of the keys, if others.
        given: the mask of a masked op. sink_tokens: of streaming ops, whose window is window[0].
        sizes: tokens per rank, None for an even or DTensor-like split; k_sizes: those of the keys,
            if others.
        layout: a kind of layout, or a spec; k_layout: that of the keys, if another.
        strided: q, k, v with a head dim that is not dense. fused: views of one tensor.
        softcap, alibi, dropout, sink: what is done to the scores.
        options: further keywords of the function, by name.
    """

    op: str
    length: int
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    heads: tuple[int, int] = (4, 4)
    batch: int = 1
    dims: tuple[int, int] = (8, 8)
    cu_seqlens: tuple[int, ...] = ()
    cu_seqlens_k: tuple[int, ...] | None = None
    given: AttnMask | None = None
    sink_tokens: int = 0
    sizes: tuple[int, ...] | None = None
    k_sizes: tuple[int, ...] | None = None
    layout: str | None = None
    k_layout: str | None = None
    dtype: torch.dtype = torch.float64
    strided: bool = False
    fused: bool = False
    softcap: float = 0.0
    alibi: bool = False
    dropout: float = 0.0
    sink: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    seed: int = 0
    device: str = "cpu"

    @property
    def packed(self) -> bool:
        """Whether tensors are [l, h, d]."""
        return self.op in PACKED_OPS

    @property
    def k_length(self) -> int:
        """Number of keys."""
        if self.given is not None:
            return self.given.k_len
        return self.length if self.cu_seqlens_k is None else self.cu_seqlens_k[-1]

    @property
    def on_one_device(self) -> Case:
        """The same without ranks, whose number layouts and teams depend on."""
        options = tuple(each for each in self.options if each[0] != "team_size")
        return replace(self, options=options, layout=None, k_layout=None, sizes=None, k_sizes=None)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Whole q, k, v and the gradient of out: [b, l, h, d], or [l, h, d] if packed."""
        g = torch.Generator().manual_seed(self.seed)

        def made(length: int, heads: int, dim: int) -> Tensor:
            lead = (length,) if self.packed else (self.batch, length)
            x = torch.randn((*lead, heads, dim), generator=g, dtype=torch.float64)
            return x.to(self.dtype).to(self.device)

        (h, n), (d, e), m = self.heads, self.dims, self.k_length
        return made(self.length, h, d), made(m, n, d), made(m, n, e), made(self.length, h, e)

    def per_head(self) -> tuple[Tensor | None, Tensor | None]:
        """ALiBi slopes [h] and sink logits [h]."""
        heads = torch.arange(1.0, 1 + self.heads[0], dtype=torch.float64)
        slopes = (heads / 7).float().to(self.device) if self.alibi else None
        sink = torch.sin(heads).to(self.dtype).to(self.device) if self.sink else None
        return slopes, sink

    def mask(self) -> AttnMask:
        """Which pairs attend."""
        if self.given is not None:
            return self.given
        if self.packed:
            window = (self.window[0], 0) if "streaming" in self.op else self.window
            return AttnMask.varlen(
                self.cu_seqlens,
                self.cu_seqlens_k,
                causal=self.causal,
                window=window,
                global_tokens=self.sink_tokens,
            )
        if self.op == "streaming":
            return AttnMask.streaming(self.length, self.window[0], self.sink_tokens)
        return AttnMask.dense(self.length, causal=self.causal, window=self.window)

    def layouts(self, ranks: int) -> tuple[Layout, Layout]:
        """Where the tokens of q and of k lie."""
        return (
            _layout(self.layout, self.sizes, self.length, ranks),
            _layout(self.k_layout or self.layout, self.k_sizes or self.sizes, self.k_length, ranks),
        )

    def layout_of(self, ranks: int) -> Layout:
        """Where the tokens of q lie."""
        return self.layouts(ranks)[0]

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None, **where: Any
    ) -> Any:
        """The public op on local tensors; out and lse."""
        options: dict[str, Any] = {
            "alibi_slopes": self.per_head()[0],
            "dropout_p": self.dropout,
            "dropout_seed": SEED,
            "softcap": self.softcap,
            "sink": sink,
            "return_lse": True,
            **dict(self.options),
            **where,
        }
        cu_q, cu_k = list(self.cu_seqlens), torch.tensor(self.cu_seqlens_k or self.cu_seqlens)
        match self.op:
            case "masked":
                assert self.given is not None
                return wrap_masked_attn_func(q, k, v, self.given, **options)
            case "streaming":
                return wrap_streaming_attn_func(
                    q, k, v, self.window[0], self.sink_tokens, **options
                )
            case "packed streaming":
                return wrap_streaming_attn_func(
                    q, k, v, self.window[0], self.sink_tokens, cu_seqlens=cu_q, **options
                )
        options |= {"causal": self.causal, "window_size": self.window}
        match self.op:
            case "window":
                return wrap_sliding_window_attn_func(q, k, v, **options)
            case "packed window":
                return wrap_sliding_window_attn_func(q, k, v, cu_q, cu_k, **options)
            case "varlen":
                return wrap_ring_attn_varlen_func(q, k, v, cu_q, cu_k.int(), **options)
        return DENSE_OPS[self.op](q, k, v, **options)


def _layout(kind: str | None, sizes: Any, total: int, ranks: int) -> Layout:
    if kind is not None:
        return Layout.parse(kind if ":" in kind else f"{kind}:{total}:{ranks}")
    if sizes is not None:
        assert sum(sizes) == total and len(sizes) == ranks
        return Layout.from_sizes(sizes)
    return Layout.contiguous(total, ranks)


def run_rank(case: Case, rank: int, ranks: int, group: Any) -> list[Tensor]:
    """What one rank computes: out, lse, dq, dk, dv of its shard, and its part of the sink's."""
    (q_layout, k_layout), dim = case.layouts(ranks), 0 if case.packed else 1
    q, k, v, dout = case.tensors()
    q, dout = (q_layout.shard(t, rank, dim) for t in (q, dout))
    k, v = (k_layout.shard(t, rank, dim) for t in (k, v))
    if case.strided:
        q, k, v = (t.transpose(-2, -1).contiguous().transpose(-2, -1) for t in (q, k, v))
    if case.fused:
        sizes = [t.shape[-2] for t in (q, k, v)]
        q, k, v = torch.cat([q, k, v], -2).split(sizes, -2)
        assert not q.is_contiguous() or q.numel() == 0 or k.numel() == 0
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    sink = case.per_head()[1]
    if sink is not None:
        leaves.append(sink.requires_grad_())
    usual = q_layout == k_layout == Layout.contiguous(q_layout.total, ranks)
    where: dict[str, Any] = {"process_group": group}
    if not (usual and len(set(q_layout.sizes)) == 1):
        where["layout"] = q_layout
        if q_layout != k_layout:
            where["k_layout"] = k_layout
    out, lse = case.call(*leaves, **where)
    grads = torch.autograd.grad(out, leaves, dout)
    return [t.detach() for t in (out, lse, *grads)]


def gather(case: Case, per_rank: list[list[Tensor]]) -> list[Tensor]:
    """Whole results from every rank's."""
    q_layout, k_layout = case.layouts(len(per_rank))
    tokens, stat = (0, 1) if case.packed else (1, 2)
    where = [(q_layout, tokens), (q_layout, stat), (q_layout, tokens)] + [(k_layout, tokens)] * 2
    whole = [layout.unshard([r[n] for r in per_rank], dim) for n, (layout, dim) in enumerate(where)]
    return whole + ([torch.stack([r[5] for r in per_rank]).sum(0)] if case.sink else [])


def expected(case: Case) -> list[Tensor]:
    """The same from dense attention on one device."""
    q, k, v, dout = case.tensors()
    q, k, v, dout = ((t.unsqueeze(0) if case.packed else t).double().cpu() for t in (q, k, v, dout))
    slopes, sink = (None if t is None else t.double().cpu() for t in case.per_head())
    scoring: dict[str, Any] = {"softcap": case.softcap, "key_positions": key_positions(case)}
    if slopes is not None:
        scoring["alibi_slopes"] = slopes.unsqueeze(0)
    if case.dropout:
        rows, keys = torch.arange(case.length), torch.arange(case.k_length)
        seed = torch.tensor([SEED])
        drawn = keep(seed, case.dropout, rows, keys, 0, case.heads[0], 0, len(q))
        scoring |= {"keep": drawn, "dropout_p": case.dropout}
    scale = q.shape[-1] ** -0.5
    results = dense_gradients(q, k, v, case.mask(), scale, dout, sink=sink, **scoring)
    return [t.squeeze(0) if case.packed and n < 5 else t for n, t in enumerate(results)]


def key_positions(case: Case) -> Tensor:
    """Where keys stand on the queries' scale: the ends of sequences, or documents, are aligned."""
    positions = torch.arange(case.k_length)
    cu_q = case.cu_seqlens or (0, case.length)
    cu_k = case.cu_seqlens_k or case.cu_seqlens or (0, case.k_length)
    for n in range(len(cu_k) - 1):
        positions[cu_k[n] : cu_k[n + 1]] -= cu_k[n + 1] - cu_q[n + 1]
    return positions
