"""Packed sequences: reading ``cu_seqlens`` on the host.

Plans are made on the host, so ``cu_seqlens`` must be there. Lists and CPU tensors cost nothing; a
tensor on a device is copied once a batch, for all layers and the backward, and copied again if it
is changed in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .arguments import ArgumentError
from .core.mask import AttnMask

CuSeqlens = Tensor | Sequence[int] | npt.NDArray[np.integer]

_host_copies: WeakIdKeyDictionary = WeakIdKeyDictionary()


def as_tensor(op: str, name: str, cu_seqlens: CuSeqlens) -> Tensor:
    """``cu_seqlens`` as an int32 or int64 tensor; lists and arrays become CPU tensors.

    Raises:
        ArgumentError: not one-dimensional, or not integers.
    """
    # Copied: the backward reads it again, and a list or array may have changed by then.
    tensor = cu_seqlens if isinstance(cu_seqlens, Tensor) else torch.tensor(cu_seqlens)
    if tensor.ndim != 1 or tensor.shape[0] == 0:
        raise ArgumentError(
            f"{op}: {name} must be one-dimensional, [documents + 1], got shape "
            f"{tuple(tensor.shape)}"
        )
    if tensor.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(f"{op}: {name} must be int32 or int64, got {tensor.dtype}")
    return tensor


def on_host(cu_seqlens: Tensor) -> npt.NDArray[np.int64]:
    """The values of an ``as_tensor`` result, as int64 on the host."""
    if cu_seqlens.device.type == "cpu":
        return cu_seqlens.detach().numpy().astype(np.int64)
    if cu_seqlens.is_inference():  # has no version to notice changes by
        return cu_seqlens.cpu().numpy().astype(np.int64)
    version = cu_seqlens._version
    known = _host_copies.get(cu_seqlens)
    if known is None or known[0] != version:
        known = (version, cu_seqlens.detach().cpu().numpy().astype(np.int64))
        _host_copies[cu_seqlens] = known
    return known[1]


def check_cu_seqlens(op: str, name: str, values: npt.NDArray[np.int64]) -> None:
    """Cumulative lengths start at 0 and never fall.

    Raises:
        ArgumentError: they do not; says where.
    """
    if values[0] != 0:
        raise ArgumentError(f"{op}: {name} must start at 0, got {_shown(values)}")
    falls = np.flatnonzero(np.diff(values) < 0)
    if len(falls):
        at = int(falls[0]) + 1
        raise ArgumentError(
            f"{op}: {name} must not fall, but {name}[{at}] = {values[at]} is below "
            f"{name}[{at - 1}] = {values[at - 1]}: {_shown(values)}"
        )


def check_total(op: str, name: str, values: npt.NDArray[np.int64], tokens: int) -> None:
    """Cumulative lengths must end at the number of tokens.

    Raises:
        ArgumentError: they do not.
    """
    if values[-1] != tokens:
        raise ArgumentError(
            f"{op}: {name} ends at {values[-1]} but there are {tokens} tokens: {_shown(values)}"
        )


def check_max_seqlen(op: str, name: str, given: int, values: npt.NDArray[np.int64]) -> None:
    """``max_seqlen`` is not needed here; one that is given (not negative) must be true.

    Raises:
        ArgumentError: a document is longer.
    """
    longest = int(np.diff(values).max(initial=0))
    if 0 <= given < longest:
        raise ArgumentError(f"{op}: {name}={given}, but the longest document has {longest} tokens")


def document_mask(
    cu_q: npt.NDArray[np.int64],
    cu_k: npt.NDArray[np.int64],
    causal: bool,
    window: tuple[int, int],
) -> AttnMask:
    """The packed mask, cached by value: layers and the backward of a batch share one."""
    return _document_mask(cu_q.tobytes(), cu_k.tobytes(), causal, window)


@lru_cache(maxsize=256)
def _document_mask(cu_q: bytes, cu_k: bytes, causal: bool, window: tuple[int, int]) -> AttnMask:
    as_array = (np.frombuffer(data, dtype=np.int64) for data in (cu_q, cu_k))
    return AttnMask.varlen(*as_array, causal=causal, window=window)


def _shown(values: npt.NDArray[np.int64]) -> str:
    """At most the first and the last few values."""
    listed = values.tolist()
    return str(listed) if len(listed) <= 8 else f"[{str(listed[:4])[1:-1]}, ..., {listed[-1]}]"
