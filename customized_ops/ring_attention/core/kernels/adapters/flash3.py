"""FlashAttention-3 for Hopper, the module ``flash_attn_interface`` (Shah et al., arXiv:2407.08608,
2024).

It has no ALiBi and no dropout. Not every version that takes ``deterministic`` heeds it (release 2.8
does not), and nothing tells which do, so it counts as lacking that.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..scoring import Scoring
from ..window import windowed
from ..window.library_calls import Packing
from ..window.lowering import Window
from ..window.signatures import call, lacking, required
from ..window.widths import WideningCapabilities, cut_to, same_width, widened_by_lse

NAME = "flash3"
CAPABILITIES = (
    WideningCapabilities(
        device="cuda",
        dtypes=(torch.bfloat16, torch.float16),
        features=("softcap", "window", "lse gradient"),
        widths=((256, 256),),
        multiple=8,
        arch=(9, 0),
    ),
)

LIBRARY = "flash_attn_interface"
PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
# What each function must take beside the options.
FUNCTIONS = {
    "_flash_attn_forward": ("q", "k", "v", *PACKED),
    "_flash_attn_backward": (
        *("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", "deterministic"),
        *PACKED,
    ),
}


@cache
def missing() -> str | None:
    """See :class:`~.protocol.Kernel`."""
    try:
        library = _library()
    except Exception as error:  # a library built for another torch raises anything
        return (
            f"{LIBRARY} cannot be imported ({error}); "
            "build it from the folder hopper of the flash-attention repository"
        )
    for name, operands in FUNCTIONS.items():
        function = getattr(library, name, None)
        lacks = [name]
        if function is not None:
            options = _options(function, (-1, -1), None, Scoring(1.0))
            lacks = lacking(function, (*operands, *options))
        if lacks:
            return f"the {LIBRARY} installed has no {', '.join(lacks)}; it must be of 2025 or newer"
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
    function = _library()._flash_attn_forward
    q_, k_, v_ = same_width(q, k, v)
    out, lse, *_ = call(function, q=q_, k=k_, v=v_, **_options(function, window, packing, scoring))
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
    function = _library()._flash_attn_backward
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
        **_options(function, window, packing, scoring),
    )
    dq, dk, dv = cut_to(grads, (q, k, v))
    return dq, dk, dv


def _library() -> ModuleType:
    return importlib.import_module(LIBRARY)


def _options(
    function: Callable[..., Any], window: Window, packing: Packing | None, scoring: Scoring
) -> dict[str, Any]:
    """What forward and backward are told alike, under the names that ``function`` has for it: they
    differ between the two and between versions."""
    takes = required(function)
    options: dict[str, Any] = {
        "softmax_scale": scoring.softmax_scale,
        "is_causal" if "is_causal" in takes else "causal": window == (-1, 0),
        "softcap": scoring.softcap,
    }
    if "window_size" in takes:
        options["window_size"] = window
    else:
        options |= {"window_size_left": window[0], "window_size_right": window[1]}
    if packing is not None:
        options |= {name: getattr(packing, name) for name in PACKED}
    return options


forward, backward = windowed.kernel_of(attend, attend_backward)
