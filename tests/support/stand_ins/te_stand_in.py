"""TransformerEngine's fused attention as far as the adapters use it, dense, for machines without.

The signatures are those of version 2.20; what cuDNN refuses is refused.
"""

from __future__ import annotations

import sys
from enum import IntEnum
from types import ModuleType
from typing import Any

import pytest
import torch
from library_signature import signature_of, takes
from torch import Tensor
from windows import attended, gradients

from customized_ops.ring_attention.core.kernels import BackwardOperands, Scoring

ROOT = "transformer_engine"


class FusedAttnBackend(IntEnum):
    """The library's backends."""

    No_Backend = -1
    F16_arbitrary_seqlen = 1
    FP8 = 2


def install(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> dict[str, ModuleType]:
    """Put the stand-in in the place of the library; ``changes`` to its fused_attn module."""
    inside = (
        "",
        ".pytorch",
        ".pytorch.utils",
        ".pytorch.cpp_extensions",
        ".pytorch.cpp_extensions.fused_attn",
    )
    modules = {name: ModuleType(ROOT + name) for name in inside}
    fused = modules[inside[-1]]
    given = {
        "FusedAttnBackend": FusedAttnBackend,
        "fused_attn_fwd": fused_attn_fwd,
        "fused_attn_bwd": fused_attn_bwd,
    }
    for name, value in (given | changes).items():
        setattr(fused, name, value)
    modules[".pytorch.utils"].get_cudnn_version = lambda: (9, 19, 0)  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, ROOT + name, module)
    return modules


# What the functions take: before the bar what has no default.
FORWARD = (
    "is_training max_seqlen_q max_seqlen_kv cu_seqlens_q cu_seqlens_kv q k v fake_dtype "
    "fused_attention_backend | attn_bias cu_seqlens_q_padded cu_seqlens_kv_padded page_table_k "
    "page_table_v s_quantizer o_quantizer attn_scale dropout fast_zero_fill qkv_layout o_format "
    "qkv_scale_inv_format attn_bias_type attn_mask_type softmax_type window_size "
    "bottom_right_diagonal rng_gen softmax_offset return_max_logit cuda_graph"
)
BACKWARD = (
    "max_seqlen_q max_seqlen_kv cu_seqlens_q cu_seqlens_kv q k v o d_o fake_dtype aux_ctx_tensors "
    "fused_attention_backend | cu_seqlens_q_padded cu_seqlens_kv_padded s_quantizer dp_quantizer "
    "dqkv_quantizer attn_scale dropout fast_zero_fill qkv_layout o_format do_format dqkv_layout "
    "qkv_scale_inv_format do_scale_inv_format attn_bias_type attn_mask_type softmax_type "
    "window_size bottom_right_diagonal deterministic cuda_graph"
)


@takes(signature_of(FORWARD))
def fused_attn_fwd(a: Any) -> tuple[Tensor, list[Tensor]]:
    """out, [stats [b, h, i, 1] or [t, h, 1], rng_state]."""
    assert a.is_training and a.attn_scale is not None and a.dropout == 0.0
    _refuse(a)
    parts = [attended(*part, Scoring(a.attn_scale)) for part in _parts(a)]
    outs, stats = zip(*parts, strict=True)
    if a.o_format == "thd":
        out, stat = torch.cat(outs, 1)[0], torch.cat(stats, 2)[0].T
    else:
        out, stat = torch.cat(outs), torch.cat(stats)
    return out, [stat.float().unsqueeze(-1), torch.zeros(2, dtype=torch.int64)]


@takes(signature_of(BACKWARD))
def fused_attn_bwd(a: Any) -> list[Tensor | None]:
    """dq, dk, dv, dbias, dsoftmax_offset."""
    assert a.attn_scale is not None
    stats, rng_state = a.aux_ctx_tensors
    assert stats.dtype == torch.float32 and stats.shape[-1] == 1 and stats.is_contiguous()
    assert rng_state.dtype == torch.int64 and rng_state.shape == (2,)
    assert a.o.shape == a.d_o.shape == (*a.q.shape[:-1], a.v.shape[-1]) and a.d_o.is_contiguous()
    assert a.do_format == a.o_format == a.qkv_layout.split("_")[0]
    assert a.dqkv_layout == a.qkv_layout
    _refuse(a)
    thd = a.o_format == "thd"
    rows = a.cu_seqlens_q.tolist() if thd else None
    grads: list[list[Tensor]] = [[], [], []]
    for n, (q, k, v, mask) in enumerate(_parts(a)):
        here = slice(rows[n], rows[n + 1]) if rows else n
        lse = stats[here].squeeze(-1).T if thd else stats[n].squeeze(-1)
        given = BackwardOperands(a.d_o[here][None], q, k, v, a.o[here][None], lse[None])
        for total, grad in zip(grads, gradients(given, mask, Scoring(a.attn_scale)), strict=True):
            total.append(grad)
    return [*(torch.cat(g, 1)[0] if thd else torch.cat(g) for g in grads), None, None]


def _refuse(a: Any) -> None:
    """Raise where cuDNN 9.19 on Hopper has no plan, or the call is not as the library wants it."""
    thd, mask = a.o_format == "thd", a.attn_mask_type
    d, e = a.q.shape[-1], a.v.shape[-1]
    for cu, offsets in (
        (a.cu_seqlens_q, a.cu_seqlens_q_padded),
        (a.cu_seqlens_kv, a.cu_seqlens_kv_padded),
    ):
        assert cu.dtype == torch.int32 and cu.is_contiguous()
        assert not thd or offsets is cu, "packed calls want the offsets, too"
    assert all(t.is_contiguous() for t in (a.q, a.k, a.v)), "the layout says where the data lie"
    assert a.fused_attention_backend is FusedAttnBackend.F16_arbitrary_seqlen
    assert a.qkv_layout == "_".join([a.o_format] * 3)
    assert thd == mask.startswith("padding"), "packed calls are padded ones"
    assert ("causal" in mask) == (a.window_size[1] == 0)
    if "causal" in mask:
        assert mask.endswith("bottom_right") == a.bottom_right_diagonal
    reasons = {
        "head dims": d % 8 or e % 8 or max(d, e) > 256,
        "mixed head dims": min(d, e) >= 128 and d != e and (d, e) != (192, 128),
        "more rows than keys": a.window_size != (-1, -1) and a.max_seqlen_q > a.max_seqlen_kv,
        "one pair": not thd and a.max_seqlen_q == a.max_seqlen_kv == 1,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"Fused attention does not support this input combination: {reason}")


def _parts(a: Any) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """q, k, v [1, rows or keys, heads, d] of each sequence, and its mask [rows, keys]."""
    if a.o_format == "thd":
        rows, keys = a.cu_seqlens_q.tolist(), a.cu_seqlens_kv.tolist()
        spans = [(slice(*rows[n : n + 2]), slice(*keys[n : n + 2])) for n in range(len(rows) - 1)]
        cut = [(a.q[i], a.k[j], a.v[j]) for i, j in spans]
    else:
        cut = list(zip(a.q, a.k, a.v, strict=True))
    left, right = a.window_size
    parts = []
    for one_q, one_k, one_v in cut:
        rows, keys = len(one_q), len(one_k)
        corner = keys - rows if a.bottom_right_diagonal else 0
        ahead = torch.arange(keys)[None] - torch.arange(rows)[:, None] - corner
        mask = torch.ones_like(ahead, dtype=torch.bool)
        if left >= 0:
            mask &= ahead >= -left
        if right >= 0:
            mask &= ahead <= right
        parts.append((one_q[None], one_k[None], one_v[None], mask))
    return parts
