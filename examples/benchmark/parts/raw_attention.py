"""The libraries' own calls, as their users make them, with which kernels are compared.

Each takes a problem of whole sequences and returns two functions without arguments, the forward and
the backward, or None if the library has no single call for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Pass = Callable[[], Any]
Raw = tuple[Pass, Pass]


@dataclass(frozen=True, eq=False)
class Problem:
    """Causal attention of whole sequences.

    Attributes:
        q, k, v, dout: [1, l, heads, d].
        window: how far back a row attends, or -1.
        cu_seqlens: int32[n + 1] on the device, if documents are packed. longest: tokens of the
            longest document.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    window: int = -1
    cu_seqlens: Tensor | None = None
    longest: int = 0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """q, k, v and dout, without the batch dim if documents are packed."""
        all_four = self.q, self.k, self.v, self.dout
        return all_four if self.cu_seqlens is None else tuple(t.squeeze(0) for t in all_four)

    @property
    def most(self) -> int:
        """Tokens of the longest sequence."""
        return self.longest or self.q.shape[1]


def flash4(p: Problem) -> Raw:
    """flash-attn-4."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    q, k, v, dout = p.tensors
    bounds: dict[str, Any] = {"causal": p.window < 0}
    if p.window >= 0:
        bounds |= {"window_size_left": p.window, "window_size_right": 0}
    if p.cu_seqlens is not None:
        bounds |= {"cu_seqlens_q": p.cu_seqlens, "cu_seqlens_k": p.cu_seqlens}
        bounds |= {"max_seqlen_q": p.most, "max_seqlen_k": p.most}
    out, lse = _flash_attn_fwd(q=q, k=k, v=v, return_lse=True, **bounds)[:2]
    return (
        lambda: _flash_attn_fwd(q=q, k=k, v=v, return_lse=True, **bounds),
        lambda: _flash_attn_bwd(q=q, k=k, v=v, out=out, dout=dout, lse=lse, **bounds),
    )


def torch_flash(p: Problem) -> Raw:
    """FlashAttention-2 in torch; on CPUs its own flash attention."""
    if not p.q.is_cuda:
        return _torch_cpu(p)
    q, k, v, dout = p.tensors
    rest: dict[str, Any] = {
        "cum_seq_q": p.cu_seqlens,
        "cum_seq_k": p.cu_seqlens,
        "max_q": p.most,
        "max_k": p.most,
        "dropout_p": 0.0,
        "is_causal": p.window < 0,
    }
    if p.window >= 0:
        rest |= {"window_size_left": p.window, "window_size_right": 0}
    ops = torch.ops.aten

    def forward() -> Any:
        return ops._flash_attention_forward(
            query=q, key=k, value=v, return_debug_mask=False, **rest
        )

    out, lse, state, unused, _ = forward()
    return forward, lambda: ops._flash_attention_backward(
        grad_out=dout,
        query=q,
        key=k,
        value=v,
        out=out,
        logsumexp=lse,
        rng_state=state,
        unused=unused,
        **rest,
    )


def _torch_cpu(p: Problem) -> Raw | None:
    if p.window >= 0 or p.cu_seqlens is not None:
        return None
    q, k, v, dout = (t.transpose(1, 2) for t in (p.q, p.k, p.v, p.dout))
    ops = torch.ops.aten

    def forward() -> Any:
        return ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)

    out, lse = forward()
    return forward, lambda: ops._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, True
    )


def cudnn(p: Problem) -> Raw | None:
    """cuDNN in torch."""
    if p.window >= 0 or p.cu_seqlens is not None:
        return None
    q, k, v, dout = (t.transpose(1, 2) for t in (p.q, p.k, p.v, p.dout))
    ops = torch.ops.aten

    def forward() -> Any:
        return ops._scaled_dot_product_cudnn_attention(
            query=q, key=k, value=v, attn_bias=None, compute_log_sumexp=True, is_causal=True
        )

    out, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = forward()
    return forward, lambda: ops._scaled_dot_product_cudnn_attention_backward(
        grad_out=dout,
        query=q,
        key=k,
        value=v,
        out=out,
        logsumexp=lse,
        philox_seed=seed,
        philox_offset=offset,
        attn_bias=None,
        cum_seq_q=cu_q,
        cum_seq_k=cu_k,
        max_q=max_q,
        max_k=max_k,
        dropout_p=0.0,
        is_causal=True,
    )


def te(p: Problem) -> Raw:
    """cuDNN in TransformerEngine."""
    import transformer_engine.pytorch  # noqa: F401  which loads its libraries
    from transformer_engine.pytorch.cpp_extensions import fused_attn

    q, k, v, dout = p.tensors
    packed = p.cu_seqlens is not None
    cu = p.cu_seqlens
    if cu is None:
        cu = torch.tensor([0, q.shape[1]], dtype=torch.int32, device=q.device)
    form = "thd" if packed else "bshd"
    given: dict[str, Any] = {
        "max_seqlen_q": p.most,
        "max_seqlen_kv": p.most,
        "cu_seqlens_q": cu,
        "cu_seqlens_kv": cu,
        "cu_seqlens_q_padded": cu if packed else None,
        "cu_seqlens_kv_padded": cu if packed else None,
        "q": q,
        "k": k,
        "v": v,
        "fake_dtype": q.dtype,
        "fused_attention_backend": fused_attn.FusedAttnBackend["F16_arbitrary_seqlen"],
        "attn_scale": q.shape[-1] ** -0.5,
        "qkv_layout": "_".join([form] * 3),
        "o_format": form,
        "attn_mask_type": "padding_causal" if packed else "causal",
        "window_size": (p.window, 0),
        "bottom_right_diagonal": False,
    }

    def forward() -> Any:
        return fused_attn.fused_attn_fwd(is_training=True, **given)

    out, saved = forward()[:2]
    return forward, lambda: fused_attn.fused_attn_bwd(
        o=out,
        d_o=dout,
        aux_ctx_tensors=saved,
        do_format=form,
        dqkv_layout=given["qkv_layout"],
        **given,
    )


# The calls, by the name of the kernel that calls the same library.
RAW: dict[str, Callable[[Problem], Raw | None]] = {
    "flash4": flash4,
    "torch": torch_flash,
    "cudnn": cudnn,
    "te": te,
}
