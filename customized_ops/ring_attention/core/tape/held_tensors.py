"""Tensors, and views of memory, inside the arguments of a call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Types of most arguments that are no tensors, and hold none.
PLAIN = {type(None), int, float, bool, str, torch.Size, torch.dtype, torch.device}
# Attributes of objects that are views of memory which torch does not know.
VIEWS_OF = "__dlpack__", "data_ptr", "__array_interface__", "__cuda_array_interface__"


def hides_memory(value: Any) -> bool:
    """Whether it is, or contains, a view of memory that torch does not know, such as an array or
    what dlpack makes of a tensor. It would be the same in all calls."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return any(type(each) not in PLAIN and hides_memory(each) for each in value)
    return not isinstance(value, (Tensor, np.generic)) and any(hasattr(value, n) for n in VIEWS_OF)


def all_tensors(value: Any) -> Iterator[Tensor]:
    """A tensor, or those in lists, tuples, dicts and dataclasses."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            if type(each) not in PLAIN:
                yield from all_tensors(each)
    elif isinstance(value, Mapping):
        yield from all_tensors(list(value.values()))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from all_tensors([getattr(value, field.name) for field in fields(value)])


def holds_tensors(value: Any) -> bool:
    """Whether there are any of :func:`all_tensors`."""
    return any(True for _ in all_tensors(value))
