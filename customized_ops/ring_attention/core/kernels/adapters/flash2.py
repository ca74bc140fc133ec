"""FlashAttention-2, the package ``flash_attn`` (Dao, arXiv:2307.08691, 2023).

Its ALiBi counts distances from the bottom right corner of each call, not between tokens of the
whole, and its dropout is drawn by torch's generator, so it does neither here.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..scoring import Scoring
from ..window import windowed
from ..window.library_calls import Packing
from ..window.lowering import Window
from ..window.signatures import call, lacking
from ..window.widths import WideningCapabilities, cut_to, same_width, widened_by_lse

NAME = "flash2"
CAPABILITIES = (
    WideningCapabilities(
        device="cuda",
        dtypes=(torch.bfloat16, torch.float16),
        features=("softcap", "window", "lse gradient", "deterministic"),
        widths=((256, 256),),
        multiple=8,
        arch=(8, 0),
    ),
)

LIBRARY = "flash_attn.flash_attn_interface"
PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
FORWARD = ("q", "k", "v", "return_softmax")
BACKWARD = ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", "deterministic")
# What each function must take beside the options.
FUNCTIONS = {
    "_flash_attn_forward": FORWARD,
    "_flash_attn_varlen_forward": FORWARD + PACKED,
    "_flash_attn_backward": BACKWARD,
    "_flash_attn_varlen_backward": BACKWARD + PACKED,
}


@cache
def missing() -> str | None:
    """See :class:`~.protocol.Kernel`."""
    try:
        library = _library()
    except Exception as error:  # a library built for another torch raises anything
        return f"{LIBRARY} cannot be imported ({error}); pip install flash-attn"
    options = tuple(_options((-1, -1), None, Scoring(1.0)))
    for name, operands in FUNCTIONS.items():
        function = getattr(library, name, None)
        lacks = lacking(function, operands + options) if function else [name]
        if lacks:
            return f"the flash_attn installed has no {', '.join(lacks)}; it must be 2.7 or newer"
    return None


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
    library = _library()
    function = (
        library._flash_attn_forward if packing is None else library._flash_attn_varlen_forward
    )
    q_, k_, v_ = same_width(q, k, v)
    out, lse, *_ = call(
        function,
        q=q_,
        k=k_,
        v=v_,
        return_softmax=False,
        **_options(window, packing, scoring),
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
    library = _library()
    function = (
        library._flash_attn_backward if packing is None else library._flash_attn_varlen_backward
    )
    dout_, out_, v_ = widened_by_lse(dout, out, v, dlse)
    dout_, out_, q_, k_, v_ = same_width(dout_, out_, q, k, v_)
    grads = tuple(t.new_empty(t.shape) for t in (q_, k_, v_))
    call(
        function,
        dout=dout_,
        q=q_,
        k=k_,
        v=v_,
        out=out_,
        softmax_lse=lse.contiguous(),
        dq=grads[0],
        dk=grads[1],
        dv=grads[2],
        deterministic=deterministic,
        **_options(window, packing, scoring),
    )
    dq, dk, dv = cut_to(grads, (q, k, v))
    return dq, dk, dv


def _library() -> ModuleType:
    return importlib.import_module(LIBRARY)


def _options(window: Window, packing: Packing | None, scoring: Scoring) -> dict[str, Any]:
    """What forward and backward are told alike."""
    options: dict[str, Any] = {
        "dropout_p": 0.0,
        "softmax_scale": scoring.softmax_scale,
        "causal": window == (-1, 0),
        "window_size_left": window[0],
        "window_size_right": window[1],
        "softcap": scoring.softcap,
        "alibi_slopes": None,
    }
    if packing is not None:
        options |= {name: getattr(packing, name) for name in PACKED}
    return options


forward, backward = windowed.kernel_of(attend, attend_backward, wide_right=False)
