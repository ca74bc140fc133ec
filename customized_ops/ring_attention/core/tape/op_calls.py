"""Calls of torch's ops, as functions of arguments in a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

# What a tape cannot repeat: results, or their shapes, that depend on values, and random numbers.
UNSEEN = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
)
# Ops whose results are made by :func:`making`, in less time and apart from what writes them, which
# is a method of the result, of some of the op's arguments.
NONE, FIRST, LAST = slice(0), slice(1), slice(-1, None)
WRITES: dict[str, tuple[Callable[..., Any], slice] | None] = {
    **dict.fromkeys(["aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty"]),
    **dict.fromkeys(["aten::zeros", "aten::zeros_like", "aten::new_zeros"], (Tensor.zero_, NONE)),
    **dict.fromkeys(["aten::full", "aten::full_like", "aten::new_full"], (Tensor.fill_, LAST)),
    # In a backward torch dispatches "to" itself, elsewhere what it is made of.
    **dict.fromkeys(["aten::clone", "aten::to", "aten::_to_copy"], (Tensor.copy_, FIRST)),
}
# Of ops that are called often: torch's methods take less time than the ops themselves.
METHODS: dict[str, Callable[..., Any]] = {
    "aten::copy_": Tensor.copy_,
    "aten::add_": Tensor.add_,
    "aten::zero_": Tensor.zero_,
    "aten::fill_": Tensor.fill_,
}


class _Regrouped(NamedTuple):
    """``function`` of arguments in a row: ``sizes`` are of those that are lists, 0 for others; the
    last have names."""

    function: Callable[..., Any]
    sizes: tuple[int, ...]
    names: tuple[str, ...]

    def __call__(self, *arguments: Any) -> Any:
        row = iter(arguments)
        given = [list(islice(row, size)) if size else next(row) for size in self.sizes]
        first = len(given) - len(self.names)
        return self.function(*given[:first], **dict(zip(self.names, given[first:], strict=True)))


def in_a_row(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """An op, and all its arguments, none of which is a list of tensors."""
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


# How code that torch.compile makes does these, in half the time; not promised to stay.
_compiled = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
# A part of a tensor's memory: of the tensor, a shape, strides, and an offset from where it starts.
view_of: Callable[..., Tensor] = getattr(_compiled, "_reinterpret_tensor", _view)


def making(t: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """A call that makes a tensor like ``t``, with nothing in it."""
    geometry = tuple(t.shape), t.stride(), t.dtype
    here = not t.is_cuda or t.device.index == torch.cuda.current_device()
    function = getattr(_compiled, f"_empty_strided_{t.device.type}", None) if here else None
    return (_empty, (*geometry, t.device)) if function is None else (function, geometry)


def memory(t: Tensor) -> int:
    """The same for tensors of one memory, and for no others that are alive."""
    return t.untyped_storage()._cdata


def written(func: Any, args: Sequence[Any], result: Tensor) -> tuple[Any, ...] | None:
    """The call that writes the result of an op among :data:`WRITES`, in a row; None for none."""
    write = WRITES[func._schema.name]
    return None if write is None else (write[0], (result, *args[write[1]]))
