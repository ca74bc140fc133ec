"""torch's own FlashAttention-2 kernels on CUDA.

They are called below ``scaled_dot_product_attention``, as what that offers has neither windows nor
packed sequences nor lse. They draw dropout by torch's generator, so that is not theirs to do, and
their ALiBi has no backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch
from torch import Tensor

from ..scoring import Scoring
from ..window import windowed
from ..window.library_calls import Packing
from ..window.lowering import Window
from ..window.widths import WideningCapabilities, cut_to, same_width, widened_by_lse

CAPABILITIES = WideningCapabilities(
    device="cuda",
    dtypes=(torch.bfloat16, torch.float16),
    features=("window", "lse gradient", "deterministic", "64-bit indices"),
    widths=((256, 256),),
    multiple=8,
    arch=(8, 0),
)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window,
    packing: Packing | None,
    scoring: Scoring,
    *,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """See :class:`~.windowed.Attend`."""
    q_, k_, v_ = same_width(q, k, v)
    cu_q, cu_k, max_q, max_k = _sequences(q, k, packing)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query=q_,
        key=k_,
        value=v_,
        cum_seq_q=cu_q,
        cum_seq_k=cu_k,
        max_q=max_q,
        max_k=max_k,
        dropout_p=0.0,
        is_causal=window == (-1, 0),
        return_debug_mask=False,
        scale=scoring.softmax_scale,
        window_size_left=window[0],
        window_size_right=window[1],
    )
    return out[..., : v.shape[-1]], lse


def attend_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    window: Window,
    packing: Packing | None,
    scoring: Scoring,
    *,
    dlse: Tensor | None,
    deterministic: bool,
    into: tuple[Tensor | None, ...] = (None, None, None),
) -> tuple[Tensor, Tensor, Tensor]:
    """See :class:`~.windowed.AttendBackward`."""
    dout_, out_, v_ = widened_by_lse(dout, out, v, dlse)
    dout_, out_, q_, k_, v_ = same_width(dout_, out_, q, k, v_)
    cu_q, cu_k, max_q, max_k = _sequences(q, k, packing)
    with _deterministic_algorithms(deterministic):
        grads = torch.ops.aten._flash_attention_backward(
            grad_out=dout_,
            query=q_,
            key=k_,
            value=v_,
            out=out_,
            logsumexp=lse.contiguous(),
            cum_seq_q=cu_q,
            cum_seq_k=cu_k,
            max_q=max_q,
            max_k=max_k,
            dropout_p=0.0,
            is_causal=window == (-1, 0),
            rng_state=lse.new_empty(2, dtype=torch.uint64),  # dropout's, so not read
            unused=lse.new_empty(0),
            scale=scoring.softmax_scale,
            window_size_left=window[0],
            window_size_right=window[1],
        )
    dq, dk, dv = cut_to(grads, (q, k, v))
    return dq, dk, dv


def _sequences(
    q: Tensor, k: Tensor, packing: Packing | None
) -> tuple[Tensor | None, Tensor | None, int, int]:
    if packing is None:
        return None, None, q.shape[1], k.shape[1]
    return (
        packing.cu_seqlens_q,
        packing.cu_seqlens_k,
        packing.max_seqlen_q,
        packing.max_seqlen_k,
    )


_mode = Lock()


@contextmanager
def _deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """torch's global switch, which the op reads when it is called, is on inside. Under a lock, so
    that no other thread's call switches it off before that."""
    if not wanted:
        yield
        return
    with _mode:
        before = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode("error")
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before)


forward, backward = windowed.kernel_of(attend, attend_backward, wide_right=False)
