"""torch's own FlashAttention-2 kernels on CUDA.

They are called below ``scaled_dot_product_attention``, which offers neither windows nor packed
sequences nor lse. Their dropout is drawn by torch's generator, so it is not used here, and their
ALiBi has no backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from ..protocol.kernel import BackwardOperands, ForwardOperands, Grads, OutLse
from ..protocol.request import HALF, Capabilities
from ..protocol.scoring import Scoring
from ..window.library_calls import CallLimits, LibraryCall
from ..window.windowed import LSE_COLUMNS, kernel_of

CAPABILITIES = Capabilities(
    device="cuda",
    dtypes=HALF,
    features=("window", "lse gradient", "deterministic", "64-bit indices"),
    widest=256,
    multiple=8,
    lse_columns=LSE_COLUMNS,
    arch=(8, 0),
)


def attend(given: ForwardOperands, call: LibraryCall, scoring: Scoring, **_: object) -> OutLse:
    q, k, v = given
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query=q, key=k, value=v, return_debug_mask=False, **_options(q, k, call, scoring)
    )
    return out, lse


def attend_backward(
    given: BackwardOperands,
    call: LibraryCall,
    scoring: Scoring,
    *,
    deterministic: bool,
    **_: object,
) -> Grads:
    dout, q, k, v, out, lse, _dlse = given
    with _deterministic_algorithms(deterministic):
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad_out=dout,
            query=q,
            key=k,
            value=v,
            out=out,
            logsumexp=lse.contiguous(),
            rng_state=lse.new_empty(2, dtype=torch.uint64),  # dropout's, so not read
            unused=lse.new_empty(0),
            **_options(q, k, call, scoring),
        )
    return dq, dk, dv


def _options(q: Tensor, k: Tensor, call: LibraryCall, scoring: Scoring) -> dict[str, Any]:
    """What forward and backward are both given."""
    packing, (left, right) = call.packing, call.window
    return {
        "cum_seq_q": None if packing is None else packing.cu_seqlens_q,
        "cum_seq_k": None if packing is None else packing.cu_seqlens_k,
        "max_q": q.shape[1] if packing is None else packing.max_seqlen_q,
        "max_k": k.shape[1] if packing is None else packing.max_seqlen_k,
        "dropout_p": 0.0,
        "is_causal": call.window == (-1, 0),
        "scale": scoring.softmax_scale,
        "window_size_left": left,
        "window_size_right": right,
    }


_mode = Lock()


@contextmanager
def _deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Switch on torch's global setting, which the op reads, inside this context. A lock keeps other
    threads' calls from switching it off meanwhile."""
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


forward, backward, tables = kernel_of(
    attend, attend_backward, CallLimits(wide_right=False), same_widths=True
)
