"""What ``register_op`` declares: arguments, titles, names, records, rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from annotations import (
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

from .registered_ops import _transposed, matmul, maybe_transpose, norm, same, shift

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
