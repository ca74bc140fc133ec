"""A module's parameters as a graph reads them: in another dtype, or without data.

A graph that computes in another dtype than parameters are kept in casts them where they are read.
Autograd casts the gradient back, so that sums over micro-batches and ranks, and the optimizer, see
the dtype of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Module, Parameter
from torch.nn.utils.stateless import _reparametrize_module


def as_parameter(value: Tensor) -> Tensor:
    """``value``, marked so that torch, and isinstance too, take it for a Parameter."""
    value._is_param = True  # type: ignore[attr-defined]
    return value


def cast(attribute: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A parameter in the dtype to compute in; buffers as they are."""
    return as_parameter(attribute.to(dtype)) if _is_cast(attribute, dtype) else attribute


def call_in_dtype(
    module: Module, dtype: torch.dtype | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """``module(*args, **kwargs)`` with its parameters in the dtype to compute in."""
    if dtype is None:
        return module(*args, **kwargs)
    with _replaced(module, lambda tensor: cast(tensor, dtype)):
        return module(*args, **kwargs)


def in_dtype(module: Module, dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """While inside, the module has copies of its parameters in the dtype to compute in."""

    def copied(p: Tensor) -> Tensor:
        return Parameter(p.detach().to(dtype), p.requires_grad) if _is_cast(p, dtype) else p

    return _replaced(module, copied)


@contextmanager
def whole_without_data(module: Module, dtype: torch.dtype | None = None) -> Iterator[Any]:
    """While inside, ``module`` has parameters and buffers of the whole shapes and no data. So a
    module can be captured that is sharded, or was never in memory.

    Args:
        dtype: of floating tensors, as after ``module.to(dtype)``; by default their own.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: Tensor) -> Tensor:
        # The graph holds the device; what was never on one is planned as on a CPU.
        device = "cpu" if tensor.is_meta else tensor.device
        now = dtype if tensor.is_floating_point() else None
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        with mode:
            made = torch.empty_strided(shape, stride, dtype=now or tensor.dtype, device=device)
        return Parameter(made, tensor.requires_grad) if isinstance(tensor, Parameter) else made

    with _replaced(module, fake):
        yield mode


def _is_cast(value: Tensor, dtype: torch.dtype | None) -> bool:
    floating = isinstance(value, Parameter) and value.is_floating_point()
    return dtype is not None and floating and value.dtype != dtype


def _replaced(module: Module, make: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
    """While inside, the module has what ``make`` returns for its parameters and buffers; tied ones
    stay tied."""
    named: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    named |= module.named_buffers(remove_duplicate=False)
    made = {id(tensor): make(tensor) for tensor in dict.fromkeys(named.values())}
    values = {n: made[id(t)] for n, t in named.items() if made[id(t)] is not t}
    return _reparametrize_module(module, values, stack_weights=True)
