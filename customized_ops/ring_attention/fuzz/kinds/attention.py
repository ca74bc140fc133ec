"""Cases of the attention ops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ... import (
    AttnMask,
    Layout,
    wrap_masked_attn_func,
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
    wrap_sliding_window_attn_func,
    wrap_streaming_attn_func,
    wrap_zigzag_allgather_attn_varlen_func,
    wrap_zigzag_attn_func,
)
from ...core.kernels.protocol.scoring import keep
from ..specification import dense_attention
from .distributed_case import WHOLE, DistributedCase, Place, cut
from .masks import smaller_masks
from .sequences import fewer_tokens, layout_of

DENSE_OPS = {"ring": wrap_ring_attn_func, "zigzag": wrap_zigzag_attn_func}
PACKED_OPS = ("varlen", "gathered keys", "packed window", "packed streaming")
SEED = 1234567890123


@dataclass(frozen=True)
class Case(DistributedCase):
    """One call of an op on one global problem.

    Attributes:
        op: ring, zigzag, varlen, window, streaming, packed window, packed streaming, masked; or
            gathered keys, with q zigzag by document and keys whole on every rank.
        cu_seqlens: documents of packed ops. cu_seqlens_k: those of the keys, if they differ.
        given: the mask of a masked op. sink_tokens: of streaming ops, whose window is window[0].
        sizes: tokens per rank, None for an even or DTensor-like split; k_sizes: the same for the
            keys, if they differ.
        k_layout: the layout of the keys, if it differs. fused: q, k, v are views of one tensor.
        softcap, alibi, dropout, sink: what is done to the scores.
        of_lse: whether lse has a gradient too. options: further keywords of the function, by name.
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
    k_layout: str | None = None
    fused: bool = False
    softcap: float = 0.0
    alibi: bool = False
    dropout: float = 0.0
    sink: bool = False
    of_lse: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    SIMPLER: ClassVar[tuple[str, ...]] = (
        *("options", "strided", "fused", "softcap", "alibi", "dropout", "sink", "of_lse", "batch"),
        *("k_layout", "layout", "cu_seqlens_k", "window", "sink_tokens", "dtype", "causal"),
        "seed",
    )
    RESULTS: ClassVar[tuple[str, ...]] = ("out", "lse")
    PARAMETERS: ClassVar[tuple[str, ...]] = ("sink",)

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
        """The case without what depends on the number of ranks: layouts and teams."""
        options = tuple(each for each in self.options if each[0] != "team_size")
        return replace(self, options=options, layout=None, k_layout=None, sizes=None, k_sizes=None)

    @property
    def in_a_layer(self) -> Case:
        """The case without options and without anything that is drawn from a seed."""
        plain: dict[str, Any] = {"options": (), "fused": False, "alibi": False, "dropout": 0.0}
        return replace(super().in_a_layer, of_lse=False, **plain)

    def policies(self, ranks: int) -> list[str]:
        """The policies that can split the call; other policies refuse it by name."""
        heads = ["ulysses", "tp"] if self.heads[0] >= ranks else []
        batch = ["dp"] if self.batch >= ranks and not self.packed else []
        tokens = ["cp"] if min(self.length, self.k_length) >= ranks else []
        return ["auto", *tokens, *heads, *batch]

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
        """The layouts of the tokens of q and of k."""
        if self.op == "gathered keys":
            return Layout.zigzag(self.length, ranks, self.cu_seqlens), self._lie(self.k_length, 1)
        k_layout, k_sizes = self.k_layout or self.layout, self.k_sizes or self.sizes
        return (
            self._lie(self.length, ranks, self.layout, self.sizes),
            self._lie(self.k_length, ranks, k_layout, k_sizes),
        )

    def _lie(self, total: int, ranks: int, text: Any = None, sizes: Any = None) -> Layout:
        if text is not None or sizes is None:
            return layout_of(text, total, ranks)
        assert sum(sizes) == total and len(sizes) == ranks
        return Layout.from_sizes(sizes)

    def layout_of(self, ranks: int) -> Layout:
        """The layout of the tokens of q."""
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
        if self.op == "masked":
            assert self.given is not None
            return wrap_masked_attn_func(q, k, v, self.given, **options)
        if "streaming" in self.op:
            options |= {"cu_seqlens": cu_q} if self.packed else {}
            return wrap_streaming_attn_func(q, k, v, self.window[0], self.sink_tokens, **options)
        options |= {"causal": self.causal, "window_size": self.window}
        match self.op:
            case "window":
                return wrap_sliding_window_attn_func(q, k, v, **options)
            case "packed window":
                return wrap_sliding_window_attn_func(q, k, v, cu_q, cu_k, **options)
            case "varlen":
                return wrap_ring_attn_varlen_func(q, k, v, cu_q, cu_k.int(), **options)
            case "gathered keys":
                return wrap_zigzag_allgather_attn_varlen_func(q, k, v, cu_q, cu_k, **options)
        return DENSE_OPS[self.op](q, k, v, **options)

    def arguments(self) -> dict[str, Tensor]:
        q, k, v, _ = self.tensors()
        sink = self.per_head()[1]
        return {"q": q, "k": k, "v": v, **({} if sink is None else {"sink": sink})}

    def upstream(self) -> dict[str, Tensor]:
        """Gradients of out, and of lse, which is wider than half precision."""
        out = {"out": self.tensors()[3]}
        if not self.of_lse:
            return out
        rows = (self.length,) if self.packed else (self.batch, self.length)
        lse = self.normal(1)(*rows[:-1], self.heads[0], self.length)
        return out | {"lse": lse if self.dtype == torch.float64 else lse.float()}

    def places(self, ranks: int) -> dict[str, Place]:
        """Places by the layouts of q and k."""
        (q_layout, k_layout), dim = self.layouts(ranks), 0 if self.packed else 1
        rows = cut(q_layout, dim)
        keys = WHOLE if self.op == "gathered keys" else cut(k_layout, dim)
        lse = cut(q_layout, dim + 1)
        return {"q": rows, "k": keys, "v": keys, "sink": WHOLE, "out": rows, "lse": lse}

    def call_on_rank(self, given: Mapping[str, Tensor], rank: int, ranks: int, group: Any) -> Any:
        q, k, v = (given[name] for name in "qkv")
        if self.fused:
            q, k, v = torch.cat([q, k, v], -2).split([t.shape[-2] for t in (q, k, v)], -2)
            assert not q.is_contiguous() or q.numel() == 0 or k.numel() == 0
        q_layout, k_layout = self.layouts(ranks)
        usual = q_layout == k_layout == Layout.contiguous(q_layout.total, ranks)
        where: dict[str, Any] = {"process_group": group}
        follows = group is None or self.op == "gathered keys"
        if not (follows or (usual and len(set(q_layout.sizes)) == 1)):
            where["layout"] = q_layout
            if q_layout != k_layout:
                where["k_layout"] = k_layout
        return self.call(q, k, v, given.get("sink"), **where)

    def specification(self, given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Dense attention."""
        q, k, v = (given[n].unsqueeze(0) if self.packed else given[n] for n in "qkv")
        slopes = self.per_head()[0]
        scoring: dict[str, Any] = {"softcap": self.softcap, "key_positions": key_positions(self)}
        if slopes is not None:
            scoring["alibi_slopes"] = slopes.double().cpu().unsqueeze(0)
        if self.dropout:
            rows, keys = torch.arange(self.length), torch.arange(self.k_length)
            seed = torch.tensor([SEED])
            drawn = keep(seed, self.dropout, rows, keys, 0, self.heads[0], 0, len(q))
            scoring |= {"keep": drawn, "dropout_p": self.dropout}
        scale = q.shape[-1] ** -0.5
        out, lse = dense_attention(q, k, v, self.mask(), scale, sink=given.get("sink"), **scoring)
        return (out.squeeze(0), lse.squeeze(0)) if self.packed else (out, lse)

    @property
    def rows(self) -> int:
        return self.batch * self.length

    def fewer(self) -> Iterator[Case]:
        """Cases with fewer heads, smaller head dims, or less of the mask or sequence."""
        for heads in ((1, 1), (2, 1), (2, 2)):
            if heads < self.heads:
                yield replace(self, heads=heads)
        if self.dims != (4, 4):
            yield replace(self, dims=(4, 4))
        if self.given is not None:
            for mask in smaller_masks(self.given):
                yield replace(self, given=mask, length=mask.q_len)
        else:
            for tokens in fewer_tokens(self.length, self.cu_seqlens):
                yield replace(self, **tokens, cu_seqlens_k=None)


def key_positions(case: Case) -> Tensor:
    """Positions of keys among the queries: the ends of sequences, or of documents, are aligned."""
    positions = torch.arange(case.k_length)
    cu_q = case.cu_seqlens or (0, case.length)
    cu_k = case.cu_seqlens_k or case.cu_seqlens or (0, case.k_length)
    for n in range(len(cu_k) - 1):
        positions[cu_k[n] : cu_k[n + 1]] -= cu_k[n + 1] - cu_q[n + 1]
    return positions
