"""Values of arguments, as nnscaler's graph and generated code hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from nnscaler.ir.cten import IRObject, IRTensor

from annotations.codegen.constants import from_text, is_text, to_text
from annotations.codegen.public_call import without_data

# Types that generated code can write as Python reads them.
_WRITTEN = (int, float, bool, str, bytes, type(None))


def traced(x: Any) -> Any:
    """``x``, where values that nnscaler computes at run time are as they were while tracing."""
    if isinstance(x, dict):
        return {key: traced(each) for key, each in x.items()}
    if isinstance(x, list | tuple):
        return type(x)([traced(each) for each in x])
    return x.value if isinstance(x, IRObject) and not isinstance(x, IRTensor) else x


def on_meta(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as they were while tracing, with tensors without data."""
    return {
        name: without_data(tuple(x.shape), x.dtype) if isinstance(x, IRTensor) else x
        for name, x in traced(dict(arguments)).items()
    }


def writable(value: Any) -> Any:
    """``value`` as generated code can hold it: as text, if Python cannot read back its repr."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, IRObject | torch.dtype) or type(value) in _WRITTEN:
        return to_text(value) if value != value else value  # Python writes NaN as a name
    if type(value) in (list, tuple):
        each = [writable(x) for x in value]
        return to_text(value) if any(map(is_text, each)) else type(value)(each)
    return to_text(value)


def restored(value: Any) -> Any:
    """The value from which :func:`writable` made this."""
    return from_text(value) if is_text(value) else value


def tensors_in(value: Any) -> Iterator[Any]:
    """The tensors of a value, in whatever containers."""
    if isinstance(value, IRTensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, Sequence | set) and not isinstance(value, str):
        for each in value:
            yield from tensors_in(each)
    elif hasattr(value, "value") and value.value is not value:  # a constant, or what holds one
        yield from tensors_in(value.value)
