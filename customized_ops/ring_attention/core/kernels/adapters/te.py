"""The kernel "te": cuDNN's fused attention as TransformerEngine calls it, on GPUs from Hopper on.

cuDNN builds a plan for each shape that it meets and keeps it. Unpacked calls have a shape each;
packed ones ("thd") share a plan where their token counts round up alike, so a mask of many shapes
is slow at its first step only.
"""

from __future__ import annotations

import importlib
import inspect
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...merge.merge import accumulation_dtype
from ..operands import BackwardOperands, Grads, OutLse
from ..protocol import Capabilities
from ..scoring import Scoring
from ..window import windowed
from ..window.library_calls import LibraryCall, Packing
from ..window.lowering import Window
from ..window.lse_gradient import apart

NAME = "te"
# No 64-bit indices: with 2.20.2 and cuDNN 9.19, dq of 2.5e9 elements was wrong on an H200.
CAPABILITIES = (
    Capabilities(
        device="cuda",
        dtypes=(torch.bfloat16, torch.float16),
        features=("window", "lse gradient", "deterministic"),
        widths=((256, 256),),  # on Hopper; cuDNN itself takes fewer on later GPUs
        multiple=8,
        arch=(9, 0),
    ),
)

# Arguments that older versions lack: before 2.15 outputs had no format of their own.
NEEDED = ("bottom_right_diagonal", "o_format")
# cuDNN 9.10.2: windows on both sides, packed and not; 9.10.0 and 9.10.1 compute wrongly.
CUDNN = (9, 10, 2)
# Above this head dim cuDNN's backward on Hopper wants q and v equally wide, or 192 and 128.
MIXED_WIDTHS = 128


@lru_cache(maxsize=1)  # a broken install takes long to fail, and fails alike again
def missing() -> str | None:
    """See :class:`~.protocol.Kernel`."""
    try:
        return _lacking()
    except Exception as error:  # a broken install raises anything: OSError, RuntimeError, ...
        return (
            f"transformer_engine.pytorch cannot be imported ({type(error).__name__}: {error}); "
            "pip install --no-build-isolation transformer_engine[pytorch]"
        )


def _lacking() -> str | None:
    """What keeps an installed TransformerEngine from serving, or None."""
    taken = inspect.signature(_fused().fused_attn_fwd).parameters
    lacking = [name for name in NEEDED if name not in taken]
    if lacking:
        return f"transformer_engine is too old: no {' and '.join(lacking)}; 2.15 or newer is needed"
    found = importlib.import_module("transformer_engine.pytorch.utils").get_cudnn_version()
    if tuple(found) < CUDNN:
        return f"cuDNN {_dotted(found)} is too old; {_dotted(CUDNN)} or newer is needed"
    return None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: LibraryCall,
    scoring: Scoring,
    *,
    into: OutLse | None = None,
) -> OutLse:
    """See :class:`~.windowed.Attend`."""
    shape = _Shape(q, k, v, call)
    out, (stats, *_) = _fused().fused_attn_fwd(
        is_training=True, **shape.operands(q, k, v), **shape.settings(scoring)
    )[:2]
    return shape.rows(out)[..., : v.shape[-1]], shape.lse(stats)


def attend_backward(
    given: BackwardOperands,
    call: LibraryCall,
    scoring: Scoring,
    *,
    deterministic: bool,
    into: tuple[Tensor | None, ...] = (None, None, None),
) -> Grads:
    """See :class:`~.windowed.AttendBackward`. cuDNN knows no gradient of lse: that is a second
    call, whose dq and dk are added in fp32."""
    inputs = q, k, v = given.q, given.k, given.v
    shape = _Shape(q, k, v, call)
    # What the forward drew for dropout; read by the library, used by nothing here.
    rng_state = torch.zeros(2, dtype=torch.int64, device=q.device)

    def run(given: BackwardOperands) -> list[Tensor]:
        grads = _fused().fused_attn_bwd(
            **shape.operands(given.q, given.k, given.v),
            o=shape.flat(given.out),
            d_o=shape.flat(given.dout),
            aux_ctx_tensors=[shape.stats(given.lse), rng_state],
            do_format=shape.format,
            dqkv_layout=shape.layout,
            deterministic=deterministic,
            **shape.settings(scoring),
        )
        return [
            shape.unflat(grad, t.shape)[..., : t.shape[-1]]
            for grad, t in zip(grads, inputs, strict=False)  # others follow: of bias, of sink
        ]

    dq, dk, dv = run(given)
    of_lse = apart(given)
    if of_lse is not None:
        more_dq, more_dk, _ = run(of_lse)
        wide = accumulation_dtype(q.dtype)
        dq, dk = dq.to(wide) + more_dq, dk.to(wide) + more_dk
    return dq, dk, dv


class _Shape:
    """One call's shapes in the library's words.

    Sequences of a batch are packed, too, where cuDNN refuses them otherwise: a window over more
    rows than keys, and a single pair.

    Attributes:
        format: "bshd" or "thd". layout: that of q, k and v.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, call: LibraryCall) -> None:
        window, packing = call.window, call.packing
        self._window = window
        self._width = _width(q.shape[-1], v.shape[-1])
        self._batch = q.shape[0] if packing is None else 0
        packs = packing is not None or _refused_unpacked(q.shape[1], k.shape[1], window)
        self.format = "thd" if packs else "bshd"
        self.layout = "_".join([self.format] * 3)
        self._at = packing or _one_each(self._batch, q.shape[1], k.shape[1], q.device)

    def _mask(self) -> str:
        """The library's name for the window. In a square both diagonals are the same, and cuDNN's
        backward skips the tiles beyond a top-left one only."""
        packed, square = self.format == "thd", self._at.square
        if self._window[1] != 0:
            return "padding" if packed else "no_mask"
        causal = "padding_causal" if packed else "causal"
        return causal if square else f"{causal}_bottom_right"

    def settings(self, scoring: Scoring) -> dict[str, Any]:
        """What forward and backward are told alike."""
        packed, at = self.format == "thd", self._at
        # Longest keys: at least the longest rows, which TransformerEngine asks of windows though
        # cuDNN does not where sequences are packed; it is a bound, so more does no harm.
        return {
            "max_seqlen_q": at.max_seqlen_q,
            "max_seqlen_kv": max(at.max_seqlen_k, at.max_seqlen_q if packed else 0),
            "cu_seqlens_q": at.cu_seqlens_q,
            "cu_seqlens_kv": at.cu_seqlens_k,
            "cu_seqlens_q_padded": at.cu_seqlens_q if packed else None,
            "cu_seqlens_kv_padded": at.cu_seqlens_k if packed else None,
            "fused_attention_backend": _fused().FusedAttnBackend["F16_arbitrary_seqlen"],
            "attn_scale": scoring.softmax_scale,
            "dropout": 0.0,
            "qkv_layout": self.layout,
            "o_format": self.format,
            "attn_bias_type": "no_bias",
            "attn_mask_type": self._mask(),
            "window_size": self._window,
            "bottom_right_diagonal": not at.square,
        }

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
        """q, k and v as the call's layout has them."""
        return {
            "q": self.flat(q),
            "k": self.flat(k),
            "v": self.flat(v),
            "fake_dtype": q.dtype,
        }

    def flat(self, t: Tensor) -> Tensor:
        """A tensor of rows or keys, contiguous, in the call's format and widths."""
        if self._width > t.shape[-1]:
            t = torch.nn.functional.pad(t, (0, self._width - t.shape[-1]))
        t = t.contiguous()
        return t.flatten(0, 1) if self._batch and self.format == "thd" else t

    def unflat(self, t: Tensor, shape: torch.Size) -> Tensor:
        """:meth:`flat` undone but for the width."""
        return t.view(*shape[:-1], t.shape[-1])

    def rows(self, out: Tensor) -> Tensor:
        """out as the caller's q has its rows."""
        split = self._batch and self.format == "thd"
        return out.unflatten(0, (self._batch, -1)) if split else out

    def lse(self, stats: Tensor) -> Tensor:
        """The library's [b, h, i, 1] or [t, h, 1] as [b, h, i] or [h, i], a copy."""
        stats = stats.squeeze(-1)
        if self.format == "thd":
            stats = self.rows(stats).transpose(-1, -2)
        return stats.contiguous()

    def stats(self, lse: Tensor) -> Tensor:
        """:meth:`lse` undone."""
        if self.format == "thd":
            lse = lse.transpose(-1, -2)
            lse = lse.flatten(0, 1) if self._batch else lse
        return lse.contiguous().unsqueeze(-1)


def _refused_unpacked(rows: int, keys: int, window: Window) -> bool:
    """Whether cuDNN takes a shape only as a packed one."""
    return (window != (-1, -1) and rows > keys) or rows == keys == 1


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


def _fused() -> ModuleType:
    importlib.import_module("transformer_engine.pytorch")  # which loads its libraries
    return importlib.import_module("transformer_engine.pytorch.cpp_extensions.fused_attn")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


forward, backward = windowed.kernel_of(attend, attend_backward, gaps=False)
