"""Plans on plain tensors: the same as on DTensors, with nothing saved, sent or made twice."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import engine_jobs
import lowered_jobs
import pytest
import torch
from ranks import Pool, worlds
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from annotations import ComputeConfig, parallelize
from annotations.engines.torch import LoweringError
from annotations.engines.torch.capture.capture import capture
from annotations.engines.torch.run import lowered
from annotations.engines.torch.run.execute import Program
from annotations.engines.torch.run.local_graph import overlap, simplify

aten = torch.ops.aten
talk = torch.ops._c10d_functional


@pytest.mark.slow
@worlds(cpus=[2], gpus=[2])
def test_every_kind_of_call(ranks: Pool) -> None:
    """One trace each: training (twice), x that wants a gradient, other strides, a frozen
    parameter, no gradients, inference, eval."""
    assert ranks.run(lowered_jobs.every_kind_of_call) == [7] * ranks.size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "layers", "length"),
    [
        ("cp", 1, 33),
        pytest.param(engine_jobs.heads_then_sequence, 2, 17, marks=pytest.mark.slow),
    ],
)
@worlds(cpus=[2], gpus=[2])
def test_saves_and_sends_no_more_than_on_dtensors(
    ranks: Pool, policy: Any, layers: int, length: int
) -> None:
    replies = ranks.run(lowered_jobs.saved_and_sent, policy, layers, length, False)
    for found in replies:
        (eager_bytes, eager_sent), (saved_bytes, sent) = found["on DTensors"], found["lowered"]
        # Where an op cuts what is whole, its own part is saved beside the whole: cos and sin here.
        assert 0 < saved_bytes <= 1.01 * eager_bytes
        assert 0 < sent <= eager_sent
        forward, backward = found["order"]
        assert not any("backward" in op for op in forward)
        assert sum("ring_attn.default" in op for op in forward) == layers
        assert sum("ring_attn_backward" in op for op in backward) == layers
        assert not any("ring_attn.default" in op for op in backward)
        assert found["order"] == replies[0]["order"]


@pytest.mark.slow
@worlds(cpus=[2], gpus=[2])
def test_compiled(ranks: Pool) -> None:
    """Inductor may compute cheap values again, and never what communicates."""
    for found in ranks.run(lowered_jobs.saved_and_sent, "cp", 1, 17, True):
        forward, backward = found["order"]
        assert sum("ring_attn.default" in op for op in forward) == 1
        assert not any("ring_attn.default" in op for op in backward)
        assert found["lowered"][0] <= found["on DTensors"][0]


@worlds(cpus=[2], gpus=[2])
def test_backward_twice(ranks: Pool) -> None:
    ranks.run(lowered_jobs.backward_twice)


@worlds(cpus=[2], gpus=[2])
def test_gradients_travel_before_they_are_in_grad(ranks: Pool) -> None:
    for there, said in ranks.run(lowered_jobs.early_gradients):
        assert there == [False, False]
        assert "(16,) has a gradient from outside of the module too" in said


@worlds(cpus=[2], gpus=[2])
def test_gradients_that_autograd_changes(ranks: Pool) -> None:
    for said in ranks.run(lowered_jobs.gradients_that_autograd_changes):
        assert said.startswith(
            "RuntimeError: a backward found gradients that it did not put into .grad"
        )


def test_what_cannot_be_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError("not this op")

    monkeypatch.setattr(lowered, "aot_module_simplified", fails)
    linear = torch.nn.Linear(3, 3)
    program: Any = Program(capture(linear, {"input": torch.zeros(2, 3)}), {}, None)
    with pytest.raises(LoweringError) as raised:
        lowered.Lowered(program)(linear.get_parameter, [torch.zeros(2, 3)])
    assert str(raised.value) == (
        "parallelize: the planned graph could not be lowered to plain tensors (AssertionError: "
        "not this op); with lowered=False it runs on DTensors"
    )


def test_compile_needs_lowered() -> None:
    with pytest.raises(ValueError, match="parallelize: compile=True needs lowered=True"):
        given = {"input": torch.zeros(2, 3)}
        options = {"engine": "torch", "compile": True, "lowered": False}
        parallelize(torch.nn.Linear(3, 3), given, "cp", ComputeConfig(1, 1), **options)


def targets(call: Callable[..., Any], *given: Tensor) -> list[Any]:
    """The ops left of a call, which must still compute the same."""
    module = make_fx(call, tracing_mode="fake")(*given)
    simplify(module.graph)
    module.recompile()
    assert all(map(torch.equal, module(*given), call(*given)))
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def test_views_that_change_nothing_go() -> None:
    x = torch.randn(4, 6)
    same = lambda x: (x.detach().view(4, 6).expand(4, 6).t().t().exp(),)  # noqa: E731
    assert targets(same, x) == [aten.exp.default]
    reshaped = lambda x: (x.view(24).view(2, 12).view(3, 8).exp(),)  # noqa: E731
    assert targets(reshaped, x) == [aten.view.default, aten.exp.default]
    strided = lambda x: (x.t().view(3, 2, 4).reshape(24).exp(),)  # noqa: E731
    assert len(targets(strided, x)) > 3


def test_what_is_computed_twice_is_computed_once() -> None:
    x = torch.randn(4)
    assert targets(lambda x: (x.exp() * 2 + x.exp() * 2.0,), x).count(aten.exp.default) == 1
    # 2 and 2.0 are not the same argument; what is returned stays a tensor of its own.
    assert targets(lambda x: (x.exp() * 2 + x.exp() * 2.0,), x).count(aten.mul.Tensor) == 2
    assert targets(lambda x: (x.exp(), x.exp()), x) == [aten.exp.default] * 2
    assert (
        targets(lambda x: (torch.rand_like(x) * 0 + torch.rand_like(x) * 0,), x).count(
            aten.rand_like.default
        )
        == 2
    )


def in_order(build: Callable[[Graph, Node], Any]) -> str:
    """The names of a graph's ops once messages overlap."""
    graph = Graph()
    graph.output((build(graph, graph.placeholder("x")),))
    overlap(graph)
    return " ".join(node.name for node in graph.nodes if node.op == "call_function")


def op(graph: Graph, name: str, target: Any, *args: Any) -> Node:
    return graph.create_node("call_function", target, args, name=name)


def gathered(graph: Graph, source: Node, name: str) -> Node:
    """An all-gather and the wait for it."""
    gather = talk.all_gather_into_tensor.default
    return op(
        graph, f"wait_{name}", talk.wait_tensor.default, op(graph, name, gather, source, 2, "0")
    )


def test_messages_start_early_and_are_waited_for_late() -> None:
    """As for q and k of attention: both made, then both sent, each waited for at once."""

    def build(graph: Graph, x: Node) -> Node:
        q, k = op(graph, "q", aten.sin.default, x), op(graph, "k", aten.cos.default, x)
        parts = op(graph, "parts_q", aten.split.Tensor, gathered(graph, q, "all_q"), 2)
        first = op(graph, "first_q", operator.getitem, parts, 0)
        all_k = gathered(graph, k, "all_k")
        other = op(graph, "other", aten.exp.default, x)
        product = op(graph, "product", aten.mul.Tensor, first, all_k)
        return op(graph, "end", aten.add.Tensor, product, other)

    order = "q all_q k all_k other wait_all_q parts_q first_q wait_all_k product end"
    assert in_order(build) == order


def test_messages_keep_their_order() -> None:
    """The second could start first; but on another rank it might not."""

    def build(graph: Graph, x: Node) -> Node:
        late = op(graph, "late", aten.sin.default, op(graph, "shared", aten.exp.default, x))
        first = gathered(graph, late, "first")
        second = gathered(graph, x, "second")
        both = op(graph, "both", aten.add.Tensor, first, second)
        return op(graph, "end", aten.add.Tensor, both, late)

    assert in_order(build) == "shared late first second wait_first wait_second both end"
