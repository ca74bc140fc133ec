"""Gradients divided among ranks, in generated code."""

from __future__ import annotations

import torch

from annotations import register_op
from annotations.codegen.gradient_shares import divided


def test_one_result() -> None:
    x = torch.arange(3.0, requires_grad=True)
    y = divided(x * 2, (4,))
    assert torch.equal(y, x * 2)
    y.sum().backward()
    assert x.grad.tolist() == [0.5] * 3


def test_each_result_by_its_own_number() -> None:
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    first, second = divided((a * 3, b * 3), (1, 3))
    (first + second).sum().backward()
    assert (a.grad.tolist(), b.grad.tolist()) == ([3.0, 3.0], [1.0, 1.0])


def test_a_result_changed_in_place() -> None:
    """The op's backward gets the gradient of what the op returned, and that divided."""
    x = torch.ones(2, requires_grad=True)
    y = divided(x * 3, (2,))
    y.mul_(5)
    y.backward(torch.ones(2))
    assert x.grad.tolist() == [7.5, 7.5]


@register_op("a -> a, a", name="sharestest::twice_and_thrice")
def twice_and_thrice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2, x * 3


def test_a_result_that_is_not_used() -> None:
    x = torch.ones(2, requires_grad=True)
    first, _ = divided(twice_and_thrice(x), (1, 4))
    first.sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]


def test_nothing_to_differentiate() -> None:
    x = torch.ones(2)
    assert divided(x, (2,)) is x
