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
from torch import Tensor

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


def fused_attn_fwd(
    is_training: bool,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fake_dtype: torch.dtype,
    fused_attention_backend: FusedAttnBackend,
    attn_bias: Any = None,
    cu_seqlens_q_padded: Any = None,
    cu_seqlens_kv_padded: Any = None,
    page_table_k: Any = None,
    page_table_v: Any = None,
    s_quantizer: Any = None,
    o_quantizer: Any = None,
    attn_scale: float | None = None,
    dropout: float = 0.0,
    fast_zero_fill: bool = True,
    qkv_layout: str = "sbh3d",
    o_format: str = "sbhd",
    qkv_scale_inv_format: str | None = None,
    attn_bias_type: str = "no_bias",
    attn_mask_type: str = "padding",
    softmax_type: str = "vanilla",
    window_size: tuple[int, int] = (-1, -1),
    bottom_right_diagonal: bool | None = None,
    rng_gen: Any = None,
    softmax_offset: Any = None,
    return_max_logit: bool = False,
    cuda_graph: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """out, [stats [b, h, i, 1] or [t, h, 1], rng_state]."""
    assert is_training and attn_scale is not None and dropout == 0.0
    _refuse(locals())
    parts = _parts(locals())
    outs, stats = zip(*(_dense(*part, attn_scale) for part in parts), strict=True)
    if o_format == "thd":
        out, stat = torch.cat(outs), torch.cat([s.T for s in stats])
    else:
        out, stat = torch.stack(outs), torch.stack(stats)
    return out, [stat.float().unsqueeze(-1), torch.zeros(2, dtype=torch.int64)]


def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    d_o: Tensor,
    fake_dtype: torch.dtype,
    aux_ctx_tensors: list[Tensor],
    fused_attention_backend: FusedAttnBackend,
    cu_seqlens_q_padded: Any = None,
    cu_seqlens_kv_padded: Any = None,
    s_quantizer: Any = None,
    dp_quantizer: Any = None,
    dqkv_quantizer: Any = None,
    attn_scale: float | None = None,
    dropout: float = 0.0,
    fast_zero_fill: bool = True,
    qkv_layout: str = "sbh3d",
    o_format: str = "sbhd",
    do_format: str = "sbhd",
    dqkv_layout: str = "sbh3d",
    qkv_scale_inv_format: str | None = None,
    do_scale_inv_format: str | None = None,
    attn_bias_type: str = "no_bias",
    attn_mask_type: str = "padding",
    softmax_type: str = "vanilla",
    window_size: tuple[int, int] = (-1, -1),
    bottom_right_diagonal: bool | None = None,
    deterministic: bool = False,
    cuda_graph: bool = False,
) -> list[Tensor | None]:
    """dq, dk, dv, dbias, dsoftmax_offset."""
    assert attn_scale is not None
    stats, rng_state = aux_ctx_tensors
    assert stats.dtype == torch.float32 and stats.shape[-1] == 1 and stats.is_contiguous()
    assert rng_state.dtype == torch.int64 and rng_state.shape == (2,)
    assert o.shape == d_o.shape == (*q.shape[:-1], v.shape[-1]) and d_o.is_contiguous()
    assert do_format == o_format == qkv_layout.split("_")[0] and dqkv_layout == qkv_layout
    _refuse(locals())
    thd = o_format == "thd"
    rows = cu_seqlens_q.tolist() if thd else None
    grads: list[list[Tensor]] = [[], [], []]
    for n, part in enumerate(_parts(locals())):
        here = slice(rows[n], rows[n + 1]) if rows else n
        lse = stats[here].squeeze(-1).T if thd else stats[n].squeeze(-1)
        for total, grad in zip(
            grads, _dense_backward(*part, o[here], d_o[here], lse, attn_scale), strict=True
        ):
            total.append(grad)
    joined = [torch.cat(g) if thd else torch.stack(g) for g in grads]
    return [*(g.to(q.dtype) for g in joined), None, None]


def _refuse(given: dict[str, Any]) -> None:
    """Raise where cuDNN 9.19 on Hopper has no plan, or the call is not as the library wants it."""
    q, k, v = (given[name] for name in "qkv")
    thd, mask = given["o_format"] == "thd", given["attn_mask_type"]
    most_q, most_k, window = (given[n] for n in ("max_seqlen_q", "max_seqlen_kv", "window_size"))
    d, e = q.shape[-1], v.shape[-1]
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        cu = given[name]
        assert cu.dtype == torch.int32 and cu.is_contiguous()
        assert not thd or given[f"{name}_padded"] is cu, "packed calls want the offsets, too"
    assert all(t.is_contiguous() for t in (q, k, v)), "the layout says where the data lie"
    assert given["fused_attention_backend"] is FusedAttnBackend.F16_arbitrary_seqlen
    assert given["qkv_layout"] == "_".join([given["o_format"]] * 3)
    assert thd == mask.startswith("padding"), "packed calls are padded ones"
    assert ("causal" in mask) == (window[1] == 0)
    if "causal" in mask:
        assert mask.endswith("bottom_right") == given["bottom_right_diagonal"]
    reasons = {
        "head dims": d % 8 or e % 8 or max(d, e) > 256,
        "mixed head dims": min(d, e) >= 128 and d != e and (d, e) != (192, 128),
        "more rows than keys": window != (-1, -1) and most_q > most_k,
        "one pair": not thd and most_q == most_k == 1,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"Fused attention does not support this input combination: {reason}")


def _parts(given: dict[str, Any]) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """q, k, v [rows or keys, heads, d] of each sequence, and bool[rows, keys], what it attends."""
    q, k, v = (given[name] for name in "qkv")
    if given["o_format"] == "thd":
        rows, keys = (given[f"cu_seqlens_{name}"].tolist() for name in ("q", "kv"))
        spans = [(slice(*rows[n : n + 2]), slice(*keys[n : n + 2])) for n in range(len(rows) - 1)]
        cut = [(q[i], k[j], v[j]) for i, j in spans]
    else:
        cut = list(zip(q, k, v, strict=True))
    left, right = given["window_size"]
    parts = []
    for one_q, one_k, one_v in cut:
        rows, keys = len(one_q), len(one_k)
        corner = keys - rows if given["bottom_right_diagonal"] else 0
        ahead = torch.arange(keys)[None] - torch.arange(rows)[:, None] - corner
        mask = torch.ones_like(ahead, dtype=torch.bool)
        if left >= 0:
            mask &= ahead >= -left
        if right >= 0:
            mask &= ahead <= right
        parts.append((one_q, one_k, one_v, mask))
    return parts


def _scores(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (torch.einsum("ihd,jhd->hij", q, k) * scale).masked_fill(~mask, -torch.inf)


def _dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, mask, scale)
    lse = torch.logsumexp(scores, -1)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.einsum("hij,jhe->ihe", torch.exp(scores - lse[..., None]), v), lse


def _dense_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    o: Tensor,
    d_o: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    times, groups = q.shape[1] // k.shape[1], k.shape[1]
    wide_k, wide_v = (t.repeat_interleave(times, 1) for t in (k, v))
    p = torch.exp(_scores(q, k, mask, scale) - lse[..., None].to(q.dtype))
    dp = torch.einsum("ihe,jhe->hij", d_o, wide_v)
    ds = p * (dp - (o * d_o).sum(-1).T[..., None]) * scale
    dq = torch.einsum("hij,jhd->ihd", ds, wide_k)
    dk = torch.einsum("hij,ihd->jhd", ds, q).unflatten(1, (groups, times)).sum(2)
    dv = torch.einsum("hij,ihe->jhe", p, d_o).unflatten(1, (groups, times)).sum(2)
    return dq, dk, dv
