"""Where the packed documents of a call end.

Plans are made on the host, so ``cu_seqlens`` must be there. Lists, arrays and CPU tensors are
copied at each call, which costs next to nothing; a tensor on a device is copied once a batch, for
all layers and the backward, and copied again if it is changed in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

from ...core.arrays import Ints
from ..arguments import ArgumentError

CuSeqlens = Tensor | Sequence[int] | npt.NDArray[np.integer]

_host_copies: WeakIdKeyDictionary = WeakIdKeyDictionary()


def as_tensor(op: str, name: str, cu_seqlens: CuSeqlens) -> Tensor:
    """An int32 or int64 tensor [documents + 1]: on the host a copy, on a device the one given."""
    # Copied on the host: the backward reads it again, and the caller's may have changed by then.
    # Where an array shares a tensor's memory, autograd would not notice.
    if isinstance(cu_seqlens, Tensor):
        tensor = cu_seqlens.clone() if cu_seqlens.device.type == "cpu" else cu_seqlens
    else:
        try:
            tensor = torch.tensor(cu_seqlens)
        except (TypeError, ValueError, RuntimeError):  # torch's for None, words, ragged lists
            raise ArgumentError(
                f"{op}: {name} must be integers, as a tensor, array or list, got {cu_seqlens!r}"
            ) from None
    if tensor.ndim != 1 or tensor.shape[0] == 0:
        raise ArgumentError(
            f"{op}: {name} must be one-dimensional, [documents + 1], got shape "
            f"{tuple(tensor.shape)}"
        )
    if tensor.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(f"{op}: {name} must be int32 or int64, got {tensor.dtype}")
    return tensor


def on_host(cu_seqlens: Tensor) -> Ints:
    """The values of an ``as_tensor`` result, as int64 on the host."""
    if cu_seqlens.device.type == "cpu":
        return cu_seqlens.detach().numpy().astype(np.int64)
    known = known_values(cu_seqlens)
    if known is None:
        known = cu_seqlens.detach().cpu().numpy().astype(np.int64)
        know_values(cu_seqlens, known)
    return known


def know_values(tensor: Tensor, values: Ints) -> None:
    """Let :func:`known_values` find what a tensor was made from."""
    if not tensor.is_inference():  # which has no version to notice changes by
        _host_copies[tensor] = (tensor._version, tensor.data_ptr()), values


def known_values(tensor: Tensor) -> Ints | None:
    """The values of a tensor where they are known on the host, and it was not changed since."""
    known = None if tensor.is_inference() else _host_copies.get(tensor)
    same = known is not None and known[0] == (tensor._version, tensor.data_ptr())
    return known[1] if known is not None and same else None


def has_data(tensor: Tensor) -> bool:
    """Whether a tensor's values can be read: not those of a graph that is being traced."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def value_of(cu_seqlens: Any) -> tuple[Any, ...] | None:
    """A hashable key of ``cu_seqlens``; it differs where values, shape, dtype or device differ.

    A device is waited for as in :func:`on_host`. None for what :func:`as_tensor` does not take, and
    where making the key would take as long as doing all the work again.
    """
    kind = type(cu_seqlens)
    if kind is list or kind is tuple:
        return (kind, *cu_seqlens) if set(map(type, cu_seqlens)) == {int} else None
    if kind is np.ndarray and cu_seqlens.dtype.kind == "i":
        return cu_seqlens.shape, cu_seqlens.dtype.str, cu_seqlens.tobytes()
    if kind is not Tensor or cu_seqlens.dtype not in (torch.int32, torch.int64):
        return None
    device = cu_seqlens.device
    if device.type == "cpu":  # bytes as they are: cheaper, and they tell the dtype too
        values = cu_seqlens.numpy()
    elif device.type == "cuda" and not cu_seqlens.is_inference():
        values = on_host(cu_seqlens)
    else:
        return None
    return cu_seqlens.shape, cu_seqlens.dtype, device, values.tobytes()


def check_cu_seqlens(op: str, name: str, values: Ints) -> None:
    """Cumulative lengths start at 0 and never fall."""
    if values[0] != 0:
        raise ArgumentError(f"{op}: {name} must start at 0, got {_shown(values)}")
    lengths = np.diff(values)
    if lengths.min(initial=0) < 0:
        at = int((lengths < 0).argmax()) + 1
        raise ArgumentError(
            f"{op}: {name} must not fall, but {name}[{at}] = {values[at]} is below "
            f"{name}[{at - 1}] = {values[at - 1]}: {_shown(values)}"
        )


def check_total(op: str, name: str, values: Ints, tokens: int) -> None:
    """Cumulative lengths must end at the number of tokens."""
    if values[-1] != tokens:
        remedy = (
            "; if they are a rank's part, give its process_group" if values[-1] > tokens else ""
        )
        raise ArgumentError(
            f"{op}: {name} ends at {values[-1]} but there are {tokens} tokens: {_shown(values)}"
            f"{remedy}"
        )


def check_max_seqlen(op: str, name: str, given: int, values: Ints) -> None:
    """``max_seqlen`` is not needed here; one that is given (not negative) must be true."""
    longest = int(np.diff(values).max(initial=0))
    if 0 <= given < longest:
        raise ArgumentError(f"{op}: {name}={given}, but the longest document has {longest} tokens")


def _shown(values: Ints) -> str:
    """At most the first and the last few values."""
    listed = values.tolist()
    return str(listed) if len(listed) <= 8 else f"[{str(listed[:4])[1:-1]}, ..., {listed[-1]}]"
