"""The kernel "te": cuDNN's fused attention as TransformerEngine calls it, on GPUs from Hopper on.

cuDNN builds a plan for each shape that it meets and keeps it. Unpacked calls have a shape each.
Packed ones ("thd") share a plan where their token counts round up to the same number, so a mask of
many shapes is slow at its first step only.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...merge.merge import accumulation_dtype
from ..protocol.kernel import BackwardOperands, ForwardOperands, Grads, OutLse
from ..protocol.request import HALF, Capabilities
from ..protocol.scoring import Scoring
from ..window.columns import apart
from ..window.library_calls import CallLimits, LibraryCall, Packing
from ..window.signatures import lacking
from ..window.windowed import kernel_of

NAME = "te"
# No 64-bit indices: with 2.20.2 and cuDNN 9.19, dq of 2.5e9 elements was wrong on an H200.
CAPABILITIES = (
    Capabilities(
        device="cuda",
        dtypes=HALF,
        features=("window", "lse gradient", "deterministic"),
        widest=256,  # on Hopper; cuDNN itself takes fewer on later GPUs
        multiple=8,
        arch=(9, 0),
    ),
)

# Arguments that older versions lack: before 2.15 outputs had no format of their own.
NEEDED = ("bottom_right_diagonal", "o_format")
# cuDNN 9.10.2: windows on both sides, packed and not; 9.10.0 and 9.10.1 compute wrongly.
OLDEST_CUDNN = (9, 10, 2)
# Above this head dim cuDNN's backward on Hopper wants q and v equally wide, or 192 and 128.
MIXED_WIDTHS = 128


@lru_cache(maxsize=1)  # a broken install takes long to fail
def missing() -> str | None:
    try:
        lacks = lacking(_fused().fused_attn_fwd, NEEDED)
        if lacks:
            names = " and ".join(lacks)
            return f"transformer_engine is too old: no {names}; 2.15 or newer is needed"
        utils = importlib.import_module("transformer_engine.pytorch.utils")
        found, least = (".".join(map(str, v)) for v in (utils.get_cudnn_version(), OLDEST_CUDNN))
        if tuple(utils.get_cudnn_version()) < OLDEST_CUDNN:
            return f"cuDNN {found} is too old; {least} or newer is needed"
        return None
    except Exception as error:  # a broken install raises anything: OSError, RuntimeError, ...
        return (
            f"transformer_engine.pytorch cannot be imported ({type(error).__name__}: {error}); "
            "pip install --no-build-isolation transformer_engine[pytorch]"
        )


def attend(given: ForwardOperands, call: LibraryCall, scoring: Scoring, **_: object) -> OutLse:
    q, k, v = given
    packed = _packed_if_refused(q, k, call)
    if packed is not None:
        out, lse = attend(packed.inputs(given), packed, scoring)
        return packed.unpack(out), packed.unpack_stats(lse)
    fused, shape = _fused(), _Shape(q, k, v, call)
    out, (stats, *_) = fused.fused_attn_fwd(
        is_training=True, **shape.operands(q, k, v), **shape.settings(fused, scoring)
    )[:2]
    stats = stats.squeeze(-1)  # [b, h, i, 1] or [t, h, 1]
    lse = stats if call.packing is None else stats.transpose(-1, -2)
    return out[..., : v.shape[-1]], lse.contiguous()


def attend_backward(
    given: BackwardOperands,
    call: LibraryCall,
    scoring: Scoring,
    *,
    deterministic: bool,
    **_: object,
) -> Grads:
    """cuDNN takes no gradient of lse, so it is a second call, whose dq and dk are added in fp32."""
    packed = _packed_if_refused(given.q, given.k, call)
    if packed is not None:
        grads = attend_backward(
            packed.operands(given), packed, scoring, deterministic=deterministic
        )
        return packed.unpack(grads[0]), packed.unpack(grads[1]), packed.unpack(grads[2])
    inputs = q, k, v = given.q, given.k, given.v
    fused, shape = _fused(), _Shape(q, k, v, call)
    lse = given.lse if call.packing is None else given.lse.transpose(-1, -2)
    # What the forward drew for dropout; read by the library, used by nothing here.
    rng_state = torch.zeros(2, dtype=torch.int64, device=q.device)
    stats = [lse.contiguous().unsqueeze(-1), rng_state]

    def run(given: BackwardOperands) -> list[Tensor]:
        grads = fused.fused_attn_bwd(
            **shape.operands(given.q, given.k, given.v),
            o=shape.padded(given.out),
            d_o=shape.padded(given.dout),
            aux_ctx_tensors=stats,
            do_format=shape.format,
            dqkv_layout=shape.layout,
            deterministic=deterministic,
            **shape.settings(fused, scoring),
        )  # dq, dk, dv and gradients of bias and sink
        return [
            grad.view(*t.shape[:-1], grad.shape[-1])[..., : t.shape[-1]]
            for grad, t in zip(grads, inputs, strict=False)
        ]

    dq, dk, dv = run(given)
    of_lse = apart(given)
    if of_lse is not None:
        more_dq, more_dk, _dv = run(of_lse)
        wide = accumulation_dtype(q.dtype)
        dq, dk = dq.to(wide) + more_dq, dk.to(wide) + more_dk
    return dq, dk, dv


class _Shape:
    """One call's shapes in the library's terms; ``format`` is "bshd" or "thd"."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, call: LibraryCall) -> None:
        self._window, self._width = call.window, _width(q.shape[-1], v.shape[-1])
        self._packed = call.packing is not None
        self.format = "thd" if self._packed else "bshd"
        self.layout = "_".join([self.format] * 3)
        self._at = call.packing or _one_each(*q.shape[:2], k.shape[1], q.device)

    def settings(self, fused: ModuleType, scoring: Scoring) -> dict[str, Any]:
        """What forward and backward are both given."""
        packed, at = self._packed, self._at
        # The longest keys count as at least the longest rows: TransformerEngine asks this of
        # windows, though cuDNN does not where sequences are packed. A larger bound does no harm.
        return {
            "max_seqlen_q": at.max_seqlen_q,
            "max_seqlen_kv": max(at.max_seqlen_k, at.max_seqlen_q if packed else 0),
            "cu_seqlens_q": at.cu_seqlens_q,
            "cu_seqlens_kv": at.cu_seqlens_k,
            "cu_seqlens_q_padded": at.cu_seqlens_q if packed else None,
            "cu_seqlens_kv_padded": at.cu_seqlens_k if packed else None,
            "fused_attention_backend": fused.FusedAttnBackend["F16_arbitrary_seqlen"],
            "attn_scale": scoring.softmax_scale,
            "dropout": 0.0,
            "qkv_layout": self.layout,
            "o_format": self.format,
            "attn_bias_type": "no_bias",
            "attn_mask_type": self._mask(),
            "window_size": self._window,
            "bottom_right_diagonal": not at.square,
        }

    def _mask(self) -> str:
        """The library's name for the window. In a square both diagonals are the same, and cuDNN's
        backward skips the tiles beyond the diagonal only if it is the top-left one."""
        if self._window[1] != 0:
            return "padding" if self._packed else "no_mask"
        causal = "padding_causal" if self._packed else "causal"
        return causal if self._at.square else f"{causal}_bottom_right"

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
        """q, k and v as the library takes them."""
        q, k, v = self.padded(q), self.padded(k), self.padded(v)
        return {"q": q, "k": k, "v": v, "fake_dtype": q.dtype}

    def padded(self, t: Tensor) -> Tensor:
        """A tensor of rows or keys, contiguous, in the call's width."""
        if self._width > t.shape[-1]:
            t = torch.nn.functional.pad(t, (0, self._width - t.shape[-1]))
        return t.contiguous()


def _packed_if_refused(q: Tensor, k: Tensor, call: LibraryCall) -> LibraryCall | None:
    """The call with the batch's sequences packed, where cuDNN takes them only so: a window over
    more rows than keys, and a single pair."""
    batch, rows, keys = *q.shape[:2], k.shape[1]
    if call.packing is not None:
        return None
    if (call.window == (-1, -1) or rows <= keys) and not rows == keys == 1:
        return None
    packing = _one_each(batch, rows, keys, q.device)
    return LibraryCall(call.window, packing, entries=batch)


@lru_cache(maxsize=64)
def _one_each(batch: int, rows: int, keys: int, device: torch.device) -> Packing:
    """A batch's entries as packed sequences."""
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    return Packing(starts * rows, starts * keys, rows, keys, square=rows == keys)


def _width(d: int, e: int) -> int:
    """What q, k and v are padded to, at least; 0 where cuDNN takes both head dims as they are."""
    if d == e or max(d, e) <= MIXED_WIDTHS or (d, e) == (192, 128):
        return 0
    return max(d, e)


def module(path: str) -> ModuleType:
    """A module of ``transformer_engine.pytorch``."""
    importlib.import_module("transformer_engine.pytorch")  # which loads its libraries
    return importlib.import_module(f"transformer_engine.pytorch.{path}")


def _fused() -> ModuleType:
    return module("cpp_extensions.fused_attn")


forward, backward, tables = kernel_of(attend, attend_backward, CallLimits(gaps=False))
