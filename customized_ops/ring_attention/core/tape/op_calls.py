"""Calls of torch's ops with all arguments in one flat row, as the steps of a tape have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

# A tape cannot repeat ops whose results or shapes depend on values, or that draw random numbers.
UNSEEN = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
)
# Ops that are replaced by an allocation (:func:`making`) and a method of the result that writes it,
# with the arguments that this method takes. That is faster, and lets allocations come first.
NONE, FIRST, LAST = slice(0), slice(1), slice(-1, None)
WRITES: dict[str, tuple[Callable[..., Any], slice] | None] = {
    **dict.fromkeys(["aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty"]),
    **dict.fromkeys(["aten::zeros", "aten::zeros_like", "aten::new_zeros"], (Tensor.zero_, NONE)),
    **dict.fromkeys(["aten::full", "aten::full_like", "aten::new_full"], (Tensor.fill_, LAST)),
    # In a backward torch dispatches "to" itself, elsewhere what it is made of.
    **dict.fromkeys(["aten::clone", "aten::to", "aten::_to_copy"], (Tensor.copy_, FIRST)),
}
# For ops that are called often: torch's methods take less time than the ops themselves.
METHODS: dict[str, Callable[..., Any]] = {
    "aten::copy_": Tensor.copy_,
    "aten::add_": Tensor.add_,
    "aten::zero_": Tensor.zero_,
    "aten::fill_": Tensor.fill_,
}


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
    """A function that does what the op does, and its arguments in a flat row, without lists of
    tensors."""
    given = (*args, *kwargs.values())
    sizes = tuple(len(a) if _has_tensors(a) else 0 for a in given)
    if not kwargs and not any(sizes):
        return METHODS.get(func._schema.name, func), given
    row = chain.from_iterable(a if n else [a] for a, n in zip(given, sizes, strict=True))
    return _Regrouped(func, sizes, tuple(kwargs)), tuple(row)


def _has_tensors(value: Any) -> bool:
    """Whether it is a list of tensors."""
    return isinstance(value, (list, tuple)) and any(map(torch.is_tensor, value))


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


def written(func: Any, args: Sequence[Any], result: Tensor) -> tuple[Any, ...] | None:
    """The call that writes the result of an op among :data:`WRITES`, as a function and its
    arguments; None if nothing is written."""
    write = WRITES[func._schema.name]
    return None if write is None else (write[0], (result, *args[write[1]]))
