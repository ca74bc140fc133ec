"""Tensors of a tape: how they are made anew, viewed, and known by their memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .held_tensors import holds_tensors

# Functions that make a tensor, by name, with the method that then writes it, if any, and how many
# of their last arguments this method takes. So an allocation is a step of its own.
MADE: dict[str, tuple[Callable[..., Any], int] | None] = {
    **dict.fromkeys(["empty", "empty_like", "new_empty"]),
    **dict.fromkeys(["zeros", "zeros_like", "new_zeros"], (Tensor.zero_, 0)),
    **dict.fromkeys(["full", "full_like", "new_full"], (Tensor.fill_, 1)),
}


def cannot_repeat(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a function that makes a tensor may depend on more than shapes: the function
    is not known, or a size or a value is a tensor."""
    name = getattr(function, "__name__", "")
    others = args[1:] if name.endswith("_like") else args
    return name not in MADE or holds_tensors((*others, *kwargs.values()))


def written(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor
) -> tuple[Any, tuple[Any, ...]] | None:
    """The call that writes the result of a function among :data:`MADE`, as a function and its
    arguments; None if nothing is written."""
    write = MADE[function.__name__]
    if write is None:
        return None
    method, count = write
    given = (*args, kwargs["fill_value"]) if "fill_value" in kwargs else args
    return method, (result, *given[len(given) - count :])


def memory(t: Tensor) -> int:
    """A number that tensors share if and only if they share memory, while they are alive."""
    return t.untyped_storage()._cdata


def _empty(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _view(t: Tensor, shape: torch.Size, strides: tuple[int, ...], offset: int) -> Tensor:
    return t.as_strided(shape, strides, t.storage_offset() + offset)


# Code that torch.compile generates uses these, which take half the time. They are not public.
_compiled = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
# view_of(t, shape, strides, offset): a view of t's memory; the offset counts from where t starts.
view_of: Callable[..., Tensor] = getattr(_compiled, "_reinterpret_tensor", _view)
# What makes an uninitialised tensor on the current device of a type.
_makers = {kind: getattr(_compiled, f"_empty_strided_{kind}", None) for kind in ("cpu", "cuda")}


def making(t: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """A call that makes an uninitialised tensor like ``t``."""
    geometry, device = (tuple(t.shape), t.stride(), t.dtype), t.device
    here = device.type != "cuda" or device.index == torch._C._cuda_getDevice()
    function = _makers.get(device.type) if here else None
    return (_empty, (*geometry, device)) if function is None else (function, geometry)


class Elements(NamedTuple):
    """Which elements of its memory an input has."""

    shape: torch.Size
    strides: tuple[int, ...]
    start: int

    @classmethod
    def of(cls, t: Tensor) -> Elements:
        return cls(t.shape, t.stride(), int(t.storage_offset()))

    @property
    def last(self) -> int:
        """Where its last element is."""
        steps = [(n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)]
        return self.start + sum(steps)

    def holds(self, view: Elements) -> bool:
        """Whether the first and the last element of a view in the same memory are among its own."""
        if 0 in view.shape:
            return True
        return 0 not in self.shape and self.has(view.start) and self.has(view.last)

    def has(self, place: int) -> bool:
        """Whether the element at this place is among its own."""
        rest = place - self.start
        if rest < 0:
            return False
        for stride, n in sorted(zip(self.strides, self.shape, strict=True), reverse=True):
            if n > 1 and stride:
                index, rest = divmod(rest, stride)
                if index >= n:
                    return False
        return rest == 0
