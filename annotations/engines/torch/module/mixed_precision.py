"""Computing in another dtype than parameters are kept in.

A parameter is cast where it is read, and autograd casts its gradient back: sums over micro-batches
and over ranks, and the optimizer, see the dtype of the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.utils.stateless import _reparametrize_module


def cast(attribute: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A parameter in the dtype to compute in; buffers as they are."""
    if dtype is None or not _is_cast(attribute, dtype):
        return attribute
    value = attribute.to(dtype)
    value._is_param = True  # type: ignore[attr-defined]  # a stand-in for it, to isinstance too
    return value


def call(
    module: Module, dtype: torch.dtype | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """``module(*args, **kwargs)`` with its parameters in the dtype to compute in."""
    if dtype is None:
        return module(*args, **kwargs)
    values = {name: p.to(dtype) for name, p in module.named_parameters() if _is_cast(p, dtype)}
    return torch.func.functional_call(module, values, args, dict(kwargs))


def in_dtype(module: Module, dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """While inside, the module has copies of its parameters in the dtype to compute in, tied ones
    tied."""
    if dtype is None:
        return nullcontext()
    named = dict(module.named_parameters(remove_duplicate=False))
    copies = {
        p: Parameter(p.detach().to(dtype), p.requires_grad)
        for p in set(named.values())
        if _is_cast(p, dtype)
    }
    values: dict[str, Tensor] = {name: copies[p] for name, p in named.items() if p in copies}
    return _reparametrize_module(module, values, stack_weights=True)


def _is_cast(value: Tensor, dtype: torch.dtype) -> bool:
    return isinstance(value, Parameter) and value.is_floating_point() and value.dtype != dtype
