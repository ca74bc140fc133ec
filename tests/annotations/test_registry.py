"""Ops of ``register_op`` in one process: values, gradients, graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from annotations import AnnotationError, register_op

from .registered_ops import (
    CALLS,
    W,
    X,
    _flowed,
    half,
    matmul,
    maybe_transpose,
    norm,
    normal,
    sum_and_difference,
    to_half,
)

every_call = pytest.mark.parametrize("name", CALLS)


def results_and_gradients(function: Callable[..., Any], args: tuple[Any, ...]) -> list[Tensor]:
    """Results, then gradients of a loss that weighs every element differently."""
    args = tuple(a.detach().requires_grad_(a.requires_grad) if _float(a) else a for a in args)
    results = function(*args)
    results = [results] if isinstance(results, Tensor) else list(results)
    loss = sum((r * torch.arange(1.0, 1 + r.numel()).view(r.shape)).sum() for r in results)
    leaves = [a for a in args if _float(a) and a.requires_grad]
    return [*(r.detach() for r in results), *torch.autograd.grad(loss, leaves)]


def _float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@every_call
def test_eager(name: str) -> None:
    op, args, plain = CALLS[name]
    assert_equal(results_and_gradients(op, args), results_and_gradients(plain, args))


@every_call
def test_gradcheck(name: str) -> None:
    op, args, _ = CALLS[name]
    assert torch.autograd.gradcheck(op, args)


@every_call
def test_compiled_whole(name: str) -> None:
    op, args, plain = CALLS[name]
    torch.compiler.reset()
    compiled = torch.compile(lambda *a: op(*a), fullgraph=True, backend="aot_eager")
    assert_equal(results_and_gradients(compiled, args), results_and_gradients(plain, args))


@every_call
def test_opcheck(name: str) -> None:
    op, args, _ = CALLS[name]
    torch.library.opcheck(op.record.forward, args)


@every_call
def test_opcheck_of_the_backward(name: str) -> None:
    """No gradient is another tensor's memory, and the fake has the real one's strides."""
    op, args, plain = CALLS[name]
    results = plain(*args)
    results = [results] if isinstance(results, Tensor) else list(results)
    grads = [torch.randn_like(r, memory_format=torch.contiguous_format) for r in results]
    arguments = op.record.arguments(args, {}).values()
    given = [*grads, *arguments, *(results if op.record.saves_results else [])]
    detached = [v.detach() if isinstance(v, Tensor) else v for v in given]
    torch.library.opcheck(op.record.backward, tuple(detached))


def test_is_called_like_the_function() -> None:
    x, w = normal(*X, grad=False), normal(*W, grad=False)
    assert torch.equal(matmul(w=w, x=x, scale=3.0), x @ w * 3.0)
    assert matmul.__name__ == "matmul"  # type: ignore[attr-defined]
    assert matmul.__doc__ == "A user's op whose backward is derived."


def test_second_derivatives_are_refused_not_wrong() -> None:
    x, w = normal(*X), normal(*W)
    (dx,) = torch.autograd.grad(matmul(x, w).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError) as raised:
        dx.square().sum().backward()
    assert str(raised.value) == "matmul: second derivatives are not supported"


def test_one_of_two_outputs_used() -> None:
    x = normal(*X)
    for n, plain in enumerate((lambda x: x.norm(dim=1), nn.functional.normalize)):
        assert_equal(
            results_and_gradients(lambda x, n=n: norm(x)[n], (x,)),
            results_and_gradients(plain, (x,)),
        )


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_custom_backward_gets_none_where_nothing_flows(compiled: bool) -> None:
    def used(n: int) -> list[Tensor]:
        def f(x: Tensor, y: Tensor) -> Tensor:
            return sum_and_difference(x, y)[n]

        torch.compiler.reset()
        g = torch.compile(f, fullgraph=True, backend="aot_eager") if compiled else f
        return results_and_gradients(g, (normal(3), normal(3, seed=1)))[1:]

    weights = torch.arange(1.0, 4.0, dtype=torch.float64)
    _flowed.clear()
    assert_equal(used(0), [weights, weights])
    assert_equal(used(1), [weights, -weights])
    assert _flowed == [(True, False), (False, True)]


def test_differentiable_names_who_gets_gradients() -> None:
    x, weight = normal(3), normal(3, seed=1)
    half(x, weight).sum().backward()
    assert_equal([x.grad], [weight.detach()])
    assert weight.grad is None
    assert half.record.differentiable == ("x",)


def test_nothing_differentiable() -> None:
    @register_op("a -> a", name="registrytest::signs", differentiable=())
    def signs(x: Tensor) -> Tensor:
        return x.sign()

    x = normal(3)
    (x * 2 + signs(x)).sum().backward()
    assert_equal([x.grad], [torch.full((3,), 2.0, dtype=torch.float64)])


def test_a_function_that_cuts_the_graph_is_told_apart_from_a_zero() -> None:
    @register_op("a -> a", name="registrytest::detached")
    def detached(x: Tensor) -> Tensor:
        return x.detach() * 2

    with pytest.raises(AnnotationError, match="detached: no result depends on x for autograd"):
        detached(normal(3)).sum().backward()


def test_custom_fake() -> None:
    with FakeTensorMode():
        out = to_half(torch.empty(2, 3))
    assert (out.dtype, out.shape) == (torch.float16, (2, 3))
    torch.library.opcheck(to_half.record.forward, (normal(*X),))


def test_fake_from_the_annotation() -> None:
    with FakeTensorMode():
        length, direction = norm(torch.empty(2, 3))
        turned = maybe_transpose(torch.empty(2, 3), True)
    assert (length.shape, direction.shape, turned.shape) == ((2,), (2, 3), (3, 2))
    assert length.dtype is torch.float32


def test_an_open_output_needs_a_fake() -> None:
    def pick(x: Tensor) -> Tensor:
        return x.sum(1)

    known = register_op(
        "a b -> ?", name="registrytest::pick", fake=lambda x: x.new_empty(x.shape[:1])
    )
    torch.library.opcheck(known(pick).record.forward, (normal(*X),))
    unknown = register_op("a b -> ?", name="registrytest::pick_open")(pick)
    assert unknown(normal(*X)).shape == (2,)
    with FakeTensorMode(), pytest.raises(AnnotationError, match="register_op needs fake="):
        unknown(torch.empty(2, 3))


def test_exports_as_one_node() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return matmul(x, w).relu()

    exported = torch.export.export(Model(), (torch.ones(2, 3), torch.ones(3, 4)), strict=False)
    targets = [n.target for n in exported.graph.nodes if n.op == "call_function"]
    assert targets[0] is torch.ops.registrytest.matmul.default
    assert len(targets) == 2


@register_op("a b, b -> a b", name="registrytest::spared")
def spared(x: Tensor, w: Tensor, wanted: Sequence[bool] | None = None) -> Tensor:
    """Its backward is told which gradients are needed."""
    return x * w


@pytest.mark.parametrize("learning", ["x", "w", "xw"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_backward_that_is_told_what_is_wanted(learning: str, compiled: bool) -> None:
    """The op makes nothing for what is frozen, and its fake says so."""
    given = {"x": torch.randn(3, 4), "w": torch.randn(4)}
    for name in learning:
        given[name].requires_grad_()
    wanted = [name in learning for name in "xw"]
    op = torch.compile(spared, backend="aot_eager", fullgraph=True) if compiled else spared
    op(given["x"], given["w"]).sum().backward()
    grads = {"x": given["w"].expand(3, 4), "w": given["x"].sum(0)}
    made = spared.record.backward(torch.ones(3, 4), given["x"], given["w"], wanted)
    for (name, grad), result in zip(grads.items(), made, strict=True):
        if name in learning:
            torch.testing.assert_close(given[name].grad, grad)
        assert (given[name].grad is None) == (name not in learning) == (result.shape == (0,))


def test_a_derived_backward_saves_no_results() -> None:
    @register_op("a -> a", name="registrytest::tripled")
    def tripled(x: Tensor) -> Tensor:
        return x * 3

    x = torch.ones(2, requires_grad=True)
    y = tripled(x)
    y.add_(1)  # would be an error, had the backward saved y
    y.sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]


def test_another_thread_may_draw_meanwhile() -> None:
    @register_op("a b -> a b", name="registrytest::beside_a_thread")
    def beside_a_thread(x: Tensor) -> Tensor:
        thread = threading.Thread(target=torch.rand, args=(3,))
        thread.start()
        thread.join()
        return x * 2

    assert torch.equal(beside_a_thread(torch.ones(2, 3)), torch.full((2, 3), 2.0))
