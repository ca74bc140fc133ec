"""Ops that tests of ``register_op`` call, and each in a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from annotations import AnnotatedOp, register_op


@register_op("m k+, k+ n -> m n", name="registrytest::matmul")
def matmul(x: Tensor, w: Tensor, scale: float = 1.0) -> Tensor:
    """A user's op whose backward is derived."""
    return x @ w * scale


@register_op("a b -> a, a b", name="registrytest::norm")
def norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two outputs."""
    length = x.square().sum(1).sqrt()
    return length, x / length.unsqueeze(1)


@register_op("n^ d, t -> t d", name="registrytest::look_up")
def look_up(table: Tensor, rows: Tensor) -> Tensor:
    """A float tensor and an int tensor."""
    return table[rows]


@register_op("a, a -> a", name="registrytest::plus")
def plus(x: Tensor, y: Tensor) -> Tensor:
    """Its gradients are the gradient that comes in."""
    return x + y


@register_op("a b -> a b", name="registrytest::same")
def same(x: Tensor) -> Tensor:
    """Its result is what is given."""
    return x


@register_op("a b -> a b", name="registrytest::silu")
def silu(x: Tensor) -> Tensor:
    """Its result, but not its fake, has the strides of what is given."""
    return torch.nn.functional.silu(x)


@register_op("a b -> a b", name="registrytest::shift")
def shift(x: Tensor, by: Tensor | None = None) -> Tensor:
    """An optional tensor, not annotated."""
    return x * 2 if by is None else x * 2 + by


@register_op("a, a -> a", name="registrytest::half", differentiable=["x"])
def half(x: Tensor, weight: Tensor) -> Tensor:
    """Only x gets a gradient."""
    return x * weight


def _as_halves(x: Tensor, **_: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float16)


@register_op("a b -> a b", name="registrytest::to_half", fake=_as_halves)
def to_half(x: Tensor) -> Tensor:
    """Results of another dtype than the annotation's."""
    return x.half()


_flowed: list[tuple[bool, ...]] = []


def _sum_and_difference_backward(
    grad_sum: Tensor | None, grad_difference: Tensor | None, x: Tensor, y: Tensor, *results: Tensor
) -> tuple[Tensor, Tensor]:
    assert len(results) == 2
    _flowed.append((grad_sum is not None, grad_difference is not None))
    if grad_sum is None or grad_difference is None:
        return (
            (grad_sum, grad_sum) if grad_difference is None else (grad_difference, -grad_difference)
        )
    return grad_sum + grad_difference, grad_sum - grad_difference


@register_op(
    "a, a -> a, a",
    name="registrytest::sum_and_difference",
    backward=_sum_and_difference_backward,
)
def sum_and_difference(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Custom backward."""
    return x + y, x - y


@register_op(
    "a, a -> a",
    name="registrytest::first",
    backward=lambda grad, x, y, out: (grad, None),
)
def first(x: Tensor, y: Tensor) -> Tensor:
    """Custom backward that says None for a gradient of zeros."""
    return x + 0 * y


@register_op(
    "a b+ -> a", name="registrytest::row_sum", backward=lambda grad, x, out: _spread(grad, x)
)
def row_sum(x: Tensor) -> Tensor:
    """Custom backward that returns one tensor, not a tuple."""
    return x.sum(1)


def _spread(grad: Tensor, x: Tensor) -> Tensor:
    return grad.unsqueeze(1).expand(x.shape)


@register_op("a b -> a b", name="registrytest::undropped")
def undropped(x: Tensor) -> Tensor:
    """Dropout that draws nothing."""
    return nn.functional.dropout(x * 2, 0.5, training=False)


def _transposed(x: Tensor, transposed: bool, **_: Any) -> str:
    return "a b -> b a" if transposed else "a b -> a b"


@register_op(_transposed, name="registrytest::maybe_transpose", title="maybe_transpose_func")
def maybe_transpose(x: Tensor, transposed: bool) -> Tensor:
    """Annotated by a function of its arguments."""
    return x.t() * 2 if transposed else x * 2


def normal(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_(grad)


X, W, ROWS = (2, 3), (3, 4), torch.tensor([0, 2, 2, 1])

# op, arguments, the same in plain torch
CALLS: dict[str, tuple[AnnotatedOp, tuple[Any, ...], Callable[..., Any]]] = {
    "matmul": (matmul, (normal(*X), normal(*W, seed=1)), torch.matmul),
    "matmul scaled": (matmul, (normal(*X), normal(*W), 0.5), lambda x, w, s: x @ w * s),
    "strided": (matmul, (normal(3, 2).detach().t().requires_grad_(), normal(*W)), torch.matmul),
    "two outputs": (norm, (normal(*X),), lambda x: (x.norm(dim=1), nn.functional.normalize(x))),
    "int tensor": (look_up, (normal(*X), ROWS % 2), lambda table, rows: table[rows]),
    "gradients as they came": (plus, (normal(3), normal(3, seed=1)), torch.add),
    "the input itself": (same, (normal(*X),), torch.clone),
    "strides of the input": (
        silu,
        (normal(3, 2).detach().t().requires_grad_(),),
        nn.functional.silu,
    ),
    "optional given": (shift, (normal(*X), normal(*X, seed=1)), lambda x, by: x * 2 + by),
    "optional left out": (shift, (normal(*X),), lambda x: x * 2),
    "custom backward": (
        sum_and_difference,
        (normal(3), normal(3, seed=1)),
        lambda x, y: (x + y, x - y),
    ),
    "backward that says None": (first, (normal(3), normal(3)), lambda x, y: x + 0 * y),
    "dropout outside training": (undropped, (normal(*X),), lambda x: x * 2),
    "backward of one tensor": (row_sum, (normal(*X),), lambda x: x.sum(1)),
    "annotated by arguments": (maybe_transpose, (normal(*X), True), lambda x, _: x.t() * 2),
}
