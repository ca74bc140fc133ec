"""The kernels that peers call on one device, behind one signature.

    out, lse = forward(q, k, v, form)
    dq, dk, dv = backward(dout, q, k, v, out, lse, form)

q, k, v, out and dout are [1, l, heads, d]; lse is [heads, l], in fp32, with natural logarithms. The
out and lse given to ``backward`` may be those of whole rows, while k and v are only a part of the
keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from customized_ops.ring_attention import AttnMask
from customized_ops.ring_attention.core.kernels import (
    BackwardOperands,
    ForwardOperands,
    Pairs,
    Scoring,
)
from customized_ops.ring_attention.core.kernels.adapters import reference

from .packages import not_installed


@dataclass(frozen=True, eq=False)
class Form:
    """Which pairs attend, in the form that libraries take.

    Attributes:
        causal: to the diagonal at the bottom right. window: how far back, or -1.
        cu_q, cu_k: int32 on the device, bounds of packed documents, or None.
        most_q, most_k: tokens of the longest of them.
    """

    causal: bool
    window: int = -1
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    most_q: int = 0
    most_k: int = 0

    @classmethod
    def packed(cls, q_bounds: Any, k_bounds: Any, device: torch.device, *, causal: bool) -> Form:
        """The form of documents with these bounds in q and in k."""
        cu_q, cu_k = (
            torch.tensor(np.asarray(b), dtype=torch.int32, device=device)
            for b in (q_bounds, k_bounds)
        )
        most_q, most_k = (int(np.diff(b).max()) for b in (q_bounds, k_bounds))
        return cls(causal, cu_q=cu_q, cu_k=cu_k, most_q=most_q, most_k=most_k)


Forward = Callable[[Tensor, Tensor, Tensor, Form], tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Kernel:
    """A kernel by name. missing: why it does not run here, or None."""

    name: str
    forward: Forward
    backward: Backward
    missing: Callable[[torch.device], str | None]


def _squeezed(form: Form, *tensors: Tensor) -> list[Tensor]:
    return [t if form.cu_q is None else t.squeeze(0) for t in tensors]


def _flash4_form(form: Form) -> dict[str, Any]:
    given: dict[str, Any] = {"causal": form.causal and form.window < 0}
    if form.window >= 0:
        given |= {"window_size_left": form.window, "window_size_right": 0}
    if form.cu_q is not None:
        given |= {"cu_seqlens_q": form.cu_q, "cu_seqlens_k": form.cu_k}
        given |= {"max_seqlen_q": form.most_q, "max_seqlen_k": form.most_k}
    return given


def _flash4_forward(q: Tensor, k: Tensor, v: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    q, k, v = _squeezed(form, q, k, v)
    out, lse = _flash_attn_fwd(q=q, k=k, v=v, return_lse=True, **_flash4_form(form))[:2]
    return (out, lse.squeeze(0)) if form.cu_q is None else (out.unsqueeze(0), lse)


def _flash4_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, form: Form
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    dout, q, k, v, out = _squeezed(form, dout, q, k, v, out)
    lse = lse.contiguous() if form.cu_q is not None else lse.contiguous().unsqueeze(0)
    grads = _flash_attn_bwd(q=q, k=k, v=v, out=out, dout=dout, lse=lse, **_flash4_form(form))[:3]
    dq, dk, dv = grads if form.cu_q is None else (g.unsqueeze(0) for g in grads)
    return dq, dk, dv


def _flash4_missing(device: torch.device) -> str | None:
    return not_installed(device, "flash-attn-4", "flash_attn.cute.interface")


def _aten_form(q: Tensor, k: Tensor, form: Form) -> dict[str, Any]:
    given: dict[str, Any] = {
        "cum_seq_q": form.cu_q,
        "cum_seq_k": form.cu_k,
        "max_q": form.most_q or q.shape[1],
        "max_k": form.most_k or k.shape[1],
        "dropout_p": 0.0,
        "is_causal": form.causal and form.window < 0,
    }
    if form.window >= 0:
        given |= {"window_size_left": form.window, "window_size_right": 0}
    return given


def _aten_forward(q: Tensor, k: Tensor, v: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    given = _aten_form(q, k, form)
    q, k, v = _squeezed(form, q, k, v)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query=q, key=k, value=v, return_debug_mask=False, **given
    )
    return (out, lse.squeeze(0)) if form.cu_q is None else (out.unsqueeze(0), lse)


def _aten_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, form: Form
) -> tuple[Tensor, Tensor, Tensor]:
    given = _aten_form(q, k, form)
    dout, q, k, v, out = _squeezed(form, dout, q, k, v, out)
    lse = lse.contiguous() if form.cu_q is not None else lse.contiguous().unsqueeze(0)
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # there is no dropout
    grads = torch.ops.aten._flash_attention_backward(
        grad_out=dout.contiguous(),
        query=q,
        key=k,
        value=v,
        out=out.contiguous(),
        logsumexp=lse,
        rng_state=unused,
        unused=unused,
        **given,
    )
    dq, dk, dv = grads if form.cu_q is None else (g.unsqueeze(0) for g in grads)
    return dq, dk, dv


def _aten_missing(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "needs a GPU"


def _plain_arguments(q: Tensor, k: Tensor, form: Form) -> tuple[Pairs, Scoring, None]:
    """What the reference kernel takes beside tensors."""
    bounds = [
        [0, t.shape[1]] if cu is None else cu.tolist() for t, cu in ((q, form.cu_q), (k, form.cu_k))
    ]
    mask = AttnMask.varlen(*bounds, causal=form.causal, window=(form.window, -1))
    return Pairs(mask.slices, mask.q_len, mask.k_len), Scoring(q.shape[-1] ** -0.5), None


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    given = ForwardOperands(q, k, v)
    out, lse = reference.forward(given, *_plain_arguments(q, k, form))
    return out.to(q.dtype), lse.squeeze(0)


def _plain_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, form: Form
) -> tuple[Tensor, Tensor, Tensor]:
    given = BackwardOperands(dout, q, k, v, out, lse.unsqueeze(0))
    dq, dk, dv = reference.backward(given, *_plain_arguments(q, k, form))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


KERNELS = {
    "flash4": Kernel("flash4", _flash4_forward, _flash4_backward, _flash4_missing),
    "fa2": Kernel("fa2", _aten_forward, _aten_backward, _aten_missing),
    "plain": Kernel("plain", _plain_forward, _plain_backward, lambda device: None),
}
