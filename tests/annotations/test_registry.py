"""``register_op`` in one process: autograd, graphs, records, rules, what it refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from annotations import (
    AnnotatedOp,
    AnnotationError,
    BindingError,
    Communicates,
    InnerCost,
    PartitionError,
    PartitionRule,
    SplitSite,
    Told,
    record_of,
    register_op,
    registered_ops,
)
from annotations.binding import bind, check_parts


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


DOES_NOT_FIT = """\
matmul: argument 'w' does not fit the annotation
    m k+, k+ n -> m n
          ^~
    dim 0 of w is 'k' = 3 from dim 1 of x, but w has shape (4, 4)
    expected: w of shape (3, 4)"""


class Matmul(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return matmul(x, w)


def _fake_call(x: Tensor, w: Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        matmul(x, w)


@pytest.mark.parametrize(
    "call",
    [matmul, _fake_call, lambda *args: torch.export.export(Matmul(), args, strict=False)],
    ids=["eager", "fake", "export"],
)
def test_arguments_that_do_not_fit(call: Callable[..., Any]) -> None:
    with pytest.raises(BindingError) as raised:
        call(torch.ones(2, 3), torch.ones(4, 4))
    assert str(raised.value) == DOES_NOT_FIT


def test_the_title_is_what_errors_say() -> None:
    with pytest.raises(BindingError) as raised:
        maybe_transpose(torch.ones(2, 3, 4), True)
    assert str(raised.value) == (
        "maybe_transpose_func: argument 'x' does not fit the annotation\n"
        "    a b -> b a\n"
        "    ^~~\n"
        "    x is annotated as 2 dims, 'a b', but x has shape (2, 3, 4)"
    )


def test_a_taken_name_stays_what_it_is() -> None:
    with pytest.raises(ValueError, match="registrytest::matmul is registered already"):
        register_op("a -> a", name="registrytest::matmul")(same)
    assert registered_ops()["registrytest::matmul"] is matmul.record


def test_what_is_refused_is_not_registered() -> None:
    with pytest.raises(ValueError, match="registrytest::bad has no argument 'y'"):
        register_op("a -> a", name="registrytest::bad", differentiable=["y"])(same)
    assert "registrytest::bad" not in registered_ops()


def test_the_default_name_is_the_functions() -> None:
    @register_op("a -> a")
    def registrytest_named_by_default(x: Tensor) -> Tensor:
        return x * 2

    record = registrytest_named_by_default.record
    assert record.name == "seqshard::registrytest_named_by_default"
    assert record.title == "registrytest_named_by_default"


def test_record() -> None:
    record = norm.record
    assert record.name == "registrytest::norm"
    assert record.title == "norm"
    assert record.annotation == "a b -> a, a b"
    assert record.rule == PartitionRule()
    assert list(record.signature.parameters) == ["x"]
    assert record.differentiable == ("x",)
    assert record.n_outputs == 2
    assert record.forward is torch.ops.registrytest.norm.default
    assert record.backward is torch.ops.registrytest.norm_backward.default
    schema = "registrytest::norm_backward(Tensor? grad_0, Tensor? grad_1, Tensor x) -> Tensor"
    assert str(record.backward._schema) == schema
    assert not record.saves_results
    assert matmul.record.differentiable == ("x", "w")
    assert shift.record.differentiable == ("x", "by")
    assert maybe_transpose.record.title == "maybe_transpose_func"
    assert maybe_transpose.record.annotation is _transposed


def test_records_are_found() -> None:
    assert record_of(torch.ops.registrytest.matmul.default) is matmul.record
    assert record_of(torch.ops.registrytest.matmul_backward.default) is None
    assert record_of(torch.ops.aten.mm.default) is None
    assert registered_ops()["registrytest::norm"] is norm.record
    assert all(name == record.name for name, record in registered_ops().items())


def test_record_binds_a_call() -> None:
    record = matmul.record
    arguments = record.arguments((torch.ones(2, 3),), {"w": torch.ones(3, 4)})
    assert list(arguments) == ["x", "w", "scale"]
    assert arguments["scale"] == 1.0
    bound = record.bind(arguments)
    assert bound.op == "matmul"
    assert bound.sizes == {"m": 2, "k": 3, "n": 4}
    assert bound.input_shapes == ((2, 3), (3, 4))
    assert record.bind(arguments) is bound  # bound once for these shapes
    turned = maybe_transpose.record
    for transposed, shape in ((True, (3, 2)), (False, (2, 3))):
        arguments = turned.arguments((torch.ones(2, 3), transposed), {})
        assert turned.bind(arguments).output_shapes() == (shape,)


def test_alternatives_are_bound_in_order() -> None:
    @register_op(
        lambda x, wide: ("(a 2) -> (a 2)", "b -> b") if wide else "c -> c",
        name="registrytest::alternatives",
    )
    def alternatives(x: Tensor, wide: bool) -> Tensor:
        return x * 2

    record = alternatives.record
    for wide, sizes in ((True, [{"a": 3}, {"b": 6}]), (False, [{"c": 6}])):
        arguments = record.arguments((torch.ones(6), wide), {})
        assert [bound.sizes for bound in record.bindings(arguments)] == sizes
        assert record.bind(arguments) is record.bindings(arguments)[0]


RULE = PartitionRule(
    {
        "l": Communicates(
            arguments=lambda site: {"group": site.group, "layout": f"{site.size}/{site.parts}"},
            cost=lambda bound, site, given, itemsize: InnerCost(),
        )
    }
)


def test_rule_passes_the_group_on() -> None:
    arguments = RULE.arguments("op", SplitSite("l", 10, 4, "ranks 0-3"))
    assert arguments == {"group": "ranks 0-3", "layout": "10/4"}


def test_rule_leaves_an_op_alone_where_nothing_communicates() -> None:
    assert RULE.arguments("op", SplitSite("b", 10, 4, "")) == {}
    assert RULE.arguments("op", SplitSite("l", 10, 1, "")) == {}


def test_rule_tells_which_part() -> None:
    told = Told(lambda site: {"part": site.index, "ranks": site.ranks})
    rule = PartitionRule(told={"h": told})
    assert rule.arguments("op", SplitSite("h", 10, 4, "", 3, (1, 3))) == {
        "part": 3,
        "ranks": (1, 3),
    }
    assert rule.arguments("op", SplitSite("h", 10, 1, "")) == {}


def test_costs_of_a_split() -> None:
    uneven = InnerCost(imbalance=1.5)
    rule = PartitionRule(
        {"l": Communicates(lambda site: {}, lambda *_: InnerCost("keys", 1, 2))},
        told={
            "h": Told(lambda site: {}, lambda bound, site, given, itemsize: uneven),
            "g": Told(lambda site: {}),
        },
    )
    bound = bind("b l h g -> b l h g", "my_op", ("x",), ((2, 4, 4, 4),))
    costs = [rule.cost(bound, SplitSite(name, 4, 2, ""), {}, 8) for name in "lhgb"]
    assert costs == [InnerCost("keys", 1, 2), uneven, InnerCost(), InnerCost()]


def test_parts_that_tear_inner_dims() -> None:
    bound = bind("l (g 4), l g -> l (g 4)", "my_op", ("q", "k"), ((5, 12), (5, 3)))
    check_parts(bound, bound.split("g"), 3)
    check_parts(bound, bound.split("g"), 1)
    check_parts(bound, bound.split("l"), 2)  # a plain dim may be cut unevenly
    with pytest.raises(PartitionError, match="'g' = 3 cannot be cut over 2 ranks"):
        check_parts(bound, bound.split("g"), 2)


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
