"""What torch's functions do to tensors, and their calls with all arguments in one flat row, as the
steps of a tape have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

# What functions do that a tape knows, by their names; passes with any other are not recorded. So no
# function is here whose result depends on more than its arguments, or whose shapes on values.
READ, VIEW, MAKE, WRITE, COMPUTE = "read", "view", "make", "write", "compute"
# They say how a tensor looks. (A property is read by its __get__.)
READS = """__get__ __len__ data_ptr dim element_size get_device is_complex is_contiguous
    is_floating_point is_inference ndimension nelement numel size storage_offset stride
    untyped_storage"""
# Results share the first argument's memory, or are a copy of it; no other argument is a tensor.
VIEWS = """__getitem__ as_strided chunk detach expand flatten narrow permute reshape select split
    split_with_sizes squeeze t transpose unbind unflatten unsqueeze view"""
WRITES = """__setitem__ add_ clamp_ copy_ div_ exp_ fill_ index_add_ index_copy_ masked_fill_ mul_
    neg_ sub_ zero_"""
COMPUTES = """__eq__ __invert__ add amax arange bmm cat clamp_min div einsum exp index_select log
    logaddexp logsumexp masked_fill matmul maximum minimum mul neg ones_like pad stack sub sum
    where"""
# Functions that are replaced by an allocation (:func:`making`) and a method of the result that
# writes it, with the arguments that this method takes. That is faster, and lets allocations come
# first.
NONE, FIRST, LAST = slice(0), slice(1), slice(-1, None)
MADE: dict[str, tuple[Callable[..., Any], slice] | None] = {
    **dict.fromkeys(["empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"]),
    **dict.fromkeys(["zeros", "zeros_like", "new_zeros"], (Tensor.zero_, NONE)),
    **dict.fromkeys(["full", "full_like", "new_full"], (Tensor.fill_, LAST)),
    **dict.fromkeys(["clone", "contiguous", "to"], (Tensor.copy_, FIRST)),
}
SIZED = "empty", "empty_strided", "full", "zeros"  # whose first argument is a size
# Types of most arguments that are no tensors, and hold none.
PLAIN = {type(None), int, float, bool, str, torch.Size, torch.dtype, torch.device}
KINDS = {
    **dict.fromkeys(READS.split(), READ),
    **dict.fromkeys(VIEWS.split(), VIEW),
    **dict.fromkeys(MADE, MAKE),
    **dict.fromkeys(WRITES.split(), WRITE),
    **dict.fromkeys(COMPUTES.split(), COMPUTE),
}


@cache
def kind_of(function: Any) -> str | None:
    """What a function of torch does; None where that is not known, as of any registered op."""
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return None
    return KINDS.get(getattr(function, "__name__", ""))


def cannot_repeat(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a tape cannot repeat this call of a known function: it may read a tensor's values on
    the host, as an index or a size, or has no first argument to look at."""
    kind, others = kind_of(function), args[1:]
    if args and kind is not MAKE and not kwargs and PLAIN.issuperset(map(type, others)):
        return False
    name = function.__name__
    if not args:
        return kind in (VIEW, WRITE) or MADE.get(name) is not None
    if name == "__setitem__":  # a tensor in the index may be in a slice, and a list may change
        return holds_tensors(others[:1]) or type(others[0]) is list
    if kind is VIEW or kind is MAKE:
        given = args if name in SIZED else others
        return name != "to" and holds_tensors([*given, *kwargs.values()])
    scalars = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.ndim == 0]
    return any([not t.is_floating_point() for t in scalars])


def holds_tensors(value: Any) -> bool:
    """Whether it is, or contains, a tensor; also in slices."""
    if isinstance(value, slice):
        value = value.start, value.stop, value.step
    if isinstance(value, (list, tuple)):
        return any([holds_tensors(each) for each in value])
    return isinstance(value, Tensor)


class _Regrouped(NamedTuple):
    """``function``, given its arguments in a flat row.

    Attributes:
        sizes: of each argument, the length if it is a list, else 0.
        names: of the last arguments, which are passed by keyword.
    """

    function: Callable[..., Any]
    sizes: tuple[int, ...]
    names: tuple[str, ...]

    def __call__(self, *arguments: Any) -> Any:
        row = iter(arguments)
        given = [list(islice(row, size)) if size else next(row) for size in self.sizes]
        first = len(given) - len(self.names)
        return self.function(*given[:first], **dict(zip(self.names, given[first:], strict=True)))


def in_a_row(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """A function that does the same, and its arguments in a flat row, without lists of tensors."""
    given = (*args, *kwargs.values())
    sizes = tuple(len(a) if _has_tensors(a) else 0 for a in given)
    if not kwargs and not any(sizes):
        return func, given
    row = chain.from_iterable(a if n else [a] for a, n in zip(given, sizes, strict=True))
    return _Regrouped(func, sizes, tuple(kwargs)), tuple(row)


def _has_tensors(value: Any) -> bool:
    """Whether it is a list of tensors."""
    return isinstance(value, (list, tuple)) and any([isinstance(each, Tensor) for each in value])


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


def making(t: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """A call that makes an uninitialised tensor like ``t``."""
    geometry = tuple(t.shape), t.stride(), t.dtype
    here = not t.is_cuda or t.device.index == torch.cuda.current_device()
    function = getattr(_compiled, f"_empty_strided_{t.device.type}", None) if here else None
    return (_empty, (*geometry, t.device)) if function is None else (function, geometry)


def memory(t: Tensor) -> int:
    """A number that tensors share if and only if they share memory, while they are alive."""
    return t.untyped_storage()._cdata


def written(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor
) -> tuple[Any, ...] | None:
    """The call that writes the result of a function among :data:`MADE`, as a function and its
    arguments; None if nothing is written."""
    write = MADE[func.__name__]
    given = (*args, kwargs["fill_value"]) if "fill_value" in kwargs else args
    return None if write is None else (write[0], (result, *given[write[1]]))
