"""TransformerEngine's context parallelism, gathered and dense, for machines without the library.

The signature is that of version 2.20. It knows the order in which ranks hold tokens, as the
library does, and nothing of this package's layouts.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

PATH = "transformer_engine.pytorch.attention.dot_product_attention.context_parallel"
calls: list[str] = []


def install(patch: pytest.MonkeyPatch) -> None:
    """Put the stand-in in the place of the library."""
    parts = PATH.split(".")
    for n in range(1, len(parts) + 1):
        name = ".".join(parts[:n])
        patch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules[PATH])["attn_forward_func_with_cp"] = attn_forward_func_with_cp


def attn_forward_func_with_cp(
    is_training: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    dropout_p: float,
    cp_group: Any,
    cp_global_ranks: list[int],
    cp_stream: Any,
    cp_comm_type: str,
    softmax_scale: float | None = None,
    qkv_format: str = "bshd",
    attn_mask_type: str = "causal",
    attn_bias_type: str = "no_bias",
    attn_bias: Any = None,
    deterministic: bool = False,
    use_fused_attention: bool = False,
    window_size: tuple[int, int] | None = None,
    softcap: float = 0.0,
    fp8: bool = False,
    fp8_meta: Any = None,
    quantizers: Any = None,
    pad_between_seqs: bool = False,
    use_flash_attn_3: bool = False,
    use_flash_attn_4: bool = False,
    softmax_type: str = "vanilla",
    softmax_offset: Any = None,
    fp8_output: bool = False,
    layer_number: int = 1,
    return_max_logit: bool = False,
    load_balancing_strategy: Any = None,
) -> Tensor:
    """out of the rank's tokens, as the library returns it; differentiable."""
    calls.append(cp_comm_type)
    assert is_training and use_fused_attention and dropout_p == 0.0
    assert isinstance(cp_group, dist.ProcessGroup) and cp_comm_type in ("p2p", "all_gather", "a2a")
    assert cp_global_ranks == dist.get_process_group_ranks(cp_group)
    assert cu_seqlens_q.dtype == torch.int32 and window_size is not None
    plain = window_size in ((-1, 0), (-1, -1))
    assert plain or cp_comm_type != "p2p", "no sliding window over p2p"
    thd, causal = qkv_format == "thd", "causal" in attn_mask_type
    assert thd == ("padding" in attn_mask_type) == (cu_seqlens_q_padded is not None)
    if not thd:
        assert cu_seqlens_q.tolist() == [n * max_seqlen_q for n in range(len(q) + 1)]
    cu_seqlens = cu_seqlens_q.tolist() if thd else [0, max_seqlen_q]
    return Gathered.apply(q, k, v, cp_group, cu_seqlens, causal, window_size[0], softmax_scale)


class Gathered(torch.autograd.Function):
    """Attention over the gathered tokens, of one rank's rows. Like the library's it is one node
    from q, k, v to out, with its gradients by hand: an op's backward records no others."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        q, k, v, group, cu_seqlens, causal, left, scale = args
        where = [_positions(cu_seqlens, group.size(), r) for r in range(group.size())]
        ctx.of = group, where, _mask(cu_seqlens, causal, left), scale
        ctx.save_for_backward(q, k, v)
        *_, out = _attend(ctx.of, q, k, v)
        return _own(out, ctx.of).reshape(*q.shape[:-1], v.shape[-1])

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        inputs, (group, where, _, scale) = ctx.saved_tensors, ctx.of
        q, k, v, p, out = _attend(ctx.of, *inputs)
        do = _gather(dout, group, where)
        ds = torch.einsum("bihe,bjhe->bhij", do, v)
        ds = p * (ds - (do * out).sum(-1).transpose(1, 2)[..., None]) * scale
        whole = (
            torch.einsum("bhij,bjhd->bihd", ds, k),
            torch.einsum("bhij,bihd->bjhd", ds, q),
            torch.einsum("bhij,bihe->bjhe", p, do),
        )
        grads = []
        for grad, like in zip(whole, inputs, strict=True):
            heads = like.shape[-2]
            grads.append(_own(grad.unflatten(2, (heads, -1)).sum(3), ctx.of).view(like.shape))
        return *grads, *[None] * 5


def _attend(of: Any, *qkv: Tensor) -> tuple[Tensor, ...]:
    """Whole q, k, v with as many heads each, the probabilities and out."""
    group, where, mask, scale = of
    q, k, v = (_gather(t, group, where) for t in qkv)
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    p = torch.softmax(scores.masked_fill(~mask, -torch.inf), -1)
    return q, k, v, p, torch.einsum("bhij,bjhe->bihe", p, v)


def _own(whole: Tensor, of: Any) -> Tensor:
    group, where, *_ = of
    return whole[:, where[group.rank()]]


def _positions(cu_seqlens: list[int], ranks: int, rank: int) -> Tensor:
    """Dual chunk swap: of each document chunk ``rank`` and its mirror image."""
    parts = []
    for start, stop in pairwise(cu_seqlens):
        assert (stop - start) % (2 * ranks) == 0
        chunks = torch.arange(start, stop).chunk(2 * ranks)
        parts += [chunks[rank], chunks[2 * ranks - 1 - rank]]
    return torch.cat(parts)


def _mask(cu_seqlens: list[int], causal: bool, left: int) -> Tensor:
    total = cu_seqlens[-1]
    document = torch.bucketize(torch.arange(total), torch.tensor(cu_seqlens[1:]), right=True)
    ahead = torch.arange(total)[None] - torch.arange(total)[:, None]
    mask = document[None] == document[:, None]
    mask &= (ahead <= 0) | torch.tensor(not causal)
    return mask & ((ahead >= -left) | torch.tensor(left < 0))


def _gather(t: Tensor, group: Any, where: list[Tensor]) -> Tensor:
    t = t.contiguous() if t.ndim == 4 else t.unsqueeze(0).contiguous()
    parts = [torch.empty_like(t) for _ in where]
    dist.all_gather(parts, t, group=group)
    whole = torch.cat(parts, 1)
    return torch.empty_like(whole).index_copy_(1, torch.cat(where), whole)
