"""Which calls can bypass the dispatcher: those that it would take straight to their function."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from annotations.library.bypass import can_bypass_dispatcher


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


def plain() -> Tensor:
    return torch.ones(2, requires_grad=True)


@pytest.mark.parametrize("context", [nullcontext, torch.no_grad, lambda: torch.autocast("cpu")])
def test_tensors_with_data_go_straight(context: Callable[[], AbstractContextManager[Any]]) -> None:
    with context():
        assert can_bypass_dispatcher(plain(), torch.nn.Parameter(torch.ones(2)), torch.ones(2))


@pytest.mark.parametrize(
    "other",
    [
        lambda: None,
        lambda: torch.ones(2, device="meta"),
        lambda: torch.ones(2).to_sparse(),
        lambda: torch.ones(2, dtype=torch.complex64).conj(),
        lambda: FakeTensorMode().from_tensor(torch.ones(2)),
        lambda: torch.nested.nested_tensor([torch.ones(2)]),
        lambda: torch.ones(2).as_subclass(Subclass),
    ],
)
def test_others_do_not(other: Callable[[], Any]) -> None:
    assert can_bypass_dispatcher(plain(), plain())
    assert not can_bypass_dispatcher(plain(), other())
    assert not can_bypass_dispatcher(other(), plain())


@pytest.mark.parametrize(
    "looks_on",
    [
        Dispatch,
        Function,
        torch.profiler.profile,
        torch.inference_mode,
        torch._C._AutoDispatchBelowAutograd,
        lambda: torch.device("cpu"),
    ],
)
def test_nor_does_any_that_somebody_looks_at(
    looks_on: Callable[[], AbstractContextManager[Any]],
) -> None:
    with looks_on():
        assert not can_bypass_dispatcher(torch.ones(2))
    assert can_bypass_dispatcher(torch.ones(2))


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.functionalize])
def test_nor_inside_a_transform(transform: Callable[..., Any]) -> None:
    found = []

    def look(t: Tensor) -> Tensor:
        found.append(can_bypass_dispatcher(t))
        return t * 2

    transform(look)(torch.ones(2))
    torch.jit.trace(look, torch.ones(2), check_trace=False)
    assert found == [False, False]
