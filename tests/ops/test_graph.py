"""The ops inside graphs: torch.compile, torch.export, opcheck."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from op_cases import DENSE_OPS
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from customized_ops.ring_attention import (
    AttnMask,
    Layout,
    make_plan,
    wrap_masked_attn_func,
    wrap_maybe_shuffle,
    wrap_maybe_unshuffle,
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
    wrap_roll_func,
    wrap_shard_func,
    wrap_shuffle_func,
    wrap_sliding_window_attn_func,
    wrap_streaming_attn_func,
    wrap_unshard_func,
    wrap_unshuffle_func,
)
from customized_ops.ring_attention.core.comm.comm_groups import FakeComm


class Model(nn.Module):
    def __init__(self, op: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.op, self.project = op, nn.Linear(8, 8).double()

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        q, k = self.project(x), x[:, :, :2]
        if self.op == "varlen":
            out, lse = wrap_ring_attn_varlen_func(
                q[0], k[0], k[0], cu_seqlens, cu_seqlens, causal=True, return_lse=True
            )
            return out.square().sum() + lse.sum()
        return DENSE_OPS[self.op](q, k, k, window_size=(5, -1)).square().sum()


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(1, 12, 4, 8, dtype=torch.float64)
    return x, torch.tensor([0, 5, 12], dtype=torch.int32)


@pytest.mark.parametrize("op", ["ring", "zigzag", "varlen"])
def test_compiles_whole(op: str) -> None:
    model = Model(op)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x, cu = inputs()
    results = []
    for module in (model, compiled):
        model.zero_grad()
        y = x.clone().requires_grad_()
        loss = module(y, cu)
        loss.backward()
        results.append((loss.detach(), y.grad, model.project.weight.grad.clone()))
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(eager, graph, rtol=1e-12, atol=1e-12)


MASK, SINK, SLOPES = AttnMask.prefix_lm(12, 3), torch.linspace(-1, 1, 4), torch.rand(4)
LAYOUTS = [Layout.zigzag(12, 1), Layout.from_ranges([[(0, 12)]])]
SCORES = {
    "softcap": 2.0,
    "sink": SINK.double(),
    "alibi_slopes": SLOPES,
    "dropout_p": 0.2,
    "dropout_seed": 3,
    "deterministic": True,
    "reduce_dtype": torch.float32,
}
CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "masked": lambda x, cu: wrap_masked_attn_func(x, x, x, MASK, **SCORES),
    "ring": lambda x, cu: wrap_ring_attn_func(x, x, x, layout=LAYOUTS[1], **SCORES),
    "varlen": lambda x, cu: wrap_ring_attn_varlen_func(*[x[0]] * 3, cu, cu, **SCORES),
    "window": lambda x, cu: wrap_sliding_window_attn_func(x, x, x, window_size=(3, 0), **SCORES),
    "packed window": lambda x, cu: wrap_sliding_window_attn_func(*[x[0]] * 3, cu, cu, **SCORES),
    "streaming": lambda x, cu: wrap_streaming_attn_func(x, x, x, 3, 1, **SCORES),
    "packed streaming": lambda x, cu: wrap_streaming_attn_func(
        *[x[0]] * 3, 3, 1, cu_seqlens=cu, **SCORES
    ),
    "shuffle": lambda x, cu: wrap_unshuffle_func(wrap_shuffle_func(x, LAYOUTS[0]), LAYOUTS[1]),
    "shard": lambda x, cu: wrap_unshard_func(wrap_shard_func(x, LAYOUTS[0]), LAYOUTS[1]),
    "roll": lambda x, cu: wrap_roll_func(x, -2, LAYOUTS[0]),
    "by name": lambda x, cu: wrap_roll_func(wrap_shuffle_func(x, "zigzag"), 1, "zigzag"),
    "documents": lambda x, cu: wrap_maybe_unshuffle(wrap_maybe_shuffle(x[0], cu), cu),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_public_op_compiles(name: str) -> None:
    compiled = torch.compile(CALLS[name], fullgraph=True, backend="aot_eager")
    x, cu = inputs()
    results = []
    for function in (CALLS[name], compiled):
        leaf = x.clone().requires_grad_()
        out = function(leaf, cu)
        results.append((out.detach(), torch.autograd.grad(out.square().sum(), leaf)[0]))
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(eager, graph, rtol=1e-12, atol=1e-12)


MADE_INSIDE: dict[str, Callable[[int], dict[str, Any]]] = {
    "mask": lambda n: {"mask": AttnMask.causal(n)},
    "pattern": lambda n: {"mask": AttnMask.prefix_lm(n, 3)},
    "conversion": lambda n: {"mask": AttnMask.from_slices([(0, n, 0, n, -n, 0)], n, n)},
    "joined masks": lambda n: {
        "mask": AttnMask.causal(n).restrict((0, 5)).union(AttnMask.causal(n).restrict((5, n)))
    },
    "by its class": lambda n: {"mask": AttnMask([(0, n, 0, n, 1 - n, 0)], n, n)},
    "layout": lambda n: {"mask": CAUSAL, "layout": Layout.zigzag(n, 1)},
    "own layout": lambda n: {"mask": CAUSAL, "layout": Layout.from_ranges([[(4, n), (0, 4)]])},
}
TOKENS = 16
CAUSAL = AttnMask.causal(TOKENS)


@pytest.mark.parametrize("name", MADE_INSIDE)
def test_what_is_made_inside_breaks_the_graph_once(name: str) -> None:
    """Each call makes it anew, and nothing is compiled anew for that."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def call(x: Tensor) -> Tensor:
        return wrap_masked_attn_func(x + 1, x, x, **MADE_INSIDE[name](x.shape[1])) + 1

    x = torch.randn(1, TOKENS, 2, 8)
    compiled = torch.compile(call, backend=backend, dynamic=False)
    for _ in range(4):
        assert torch.equal(compiled(x), call(x))
    assert len(graphs) == 2
    whole = torch.compile(call, backend="eager", fullgraph=True, dynamic=False)
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="read them outside of a compiled graph"
    ):
        whole(x)


READ_INSIDE: dict[str, Callable[[], float]] = {
    "area": lambda: CAUSAL.area,
    "dense": lambda: float(CAUSAL.to_dense().sum()),
    "picture": lambda: len(CAUSAL.picture()),
    "plan": lambda: float(make_plan(CAUSAL, Layout.zigzag(TOKENS, 2)).area.max()),
    "positions": lambda: float(Layout.zigzag(TOKENS, 2).positions(1)[-1]),
}


@pytest.mark.parametrize("name", READ_INSIDE)
def test_what_is_read_inside(name: str) -> None:
    compiled = torch.compile(lambda x: x * READ_INSIDE[name](), backend="eager")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), float(READ_INSIDE[name]())))


def test_dropout_without_a_seed_draws_anew_in_a_graph_too() -> None:
    compiled = torch.compile(
        lambda x: wrap_ring_attn_func(x, x, x, dropout_p=0.5), fullgraph=True, backend="aot_eager"
    )
    x, _ = inputs()
    torch.manual_seed(2)
    first, second = compiled(x), compiled(x)
    torch.manual_seed(2)
    assert torch.equal(compiled(x), first)
    assert not torch.equal(second, first)


@pytest.mark.parametrize("op", ["ring", "zigzag", "varlen"])
def test_exports_as_one_node(op: str) -> None:
    graph = torch.export.export(Model(op), inputs(), strict=False).graph
    nodes = [n for n in graph.nodes if getattr(n.target, "namespace", "") == "seqshard"]
    name = {"ring": "ring_attn", "zigzag": "zigzag_attn", "varlen": "ring_attn_varlen"}[op]
    assert [n.target._opname for n in nodes] == [name]


def test_what_another_thread_plans_is_not_noted_in_an_export(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch knows that something is exported, not in which thread, and notes what it leaves alone
    in the metadata of the trace."""
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    noted = mock.Mock(side_effect=AssertionError)
    monkeypatch.setattr(torch.fx.traceback, "annotate", noted)
    mask = AttnMask.varlen([0, 3, 8], causal=True)
    make_plan(mask, Layout.balanced(mask, 2))
    assert not noted.called


def test_max_seqlen_is_checked_in_a_graph_too() -> None:
    def call(q: Tensor, cu: Tensor) -> Tensor:
        return wrap_ring_attn_varlen_func(q, q, q, cu, cu, max_seqlen_q=3)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="max_seqlen_q=3, but the longest document has 7"):
        compiled(torch.zeros(12, 4, 8), inputs()[1])


def test_new_lengths_compile_no_more() -> None:
    """A second graph serves any number of documents."""
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def loss(q: Tensor, cu: Tensor) -> Tensor:
        return wrap_ring_attn_varlen_func(q, q, q, cu, cu, causal=True).square().sum()

    q = torch.randn(32, 2, 8)
    for ends in ([0, 32], [0, 3, 32], [0, 1, 2, 32], [0, 5, 9, 30, 32], [0, 0, 7, 7, 8, 32]):
        cu = torch.tensor(ends, dtype=torch.int32)
        expected = wrap_ring_attn_varlen_func(q, q, q, ends, ends, causal=True).square().sum()
        assert torch.equal(loss(q, cu), expected)
    assert counter.frame_count == 2


def test_balanced_by_name_compiles_no_more() -> None:
    """A layout is a constant of a graph; the name of one is the same for all lengths."""
    counter, comm = CompileCounter(), FakeComm(0, 2)

    @torch.compile(backend=counter, fullgraph=True)
    def attend(q: Tensor, cu: Tensor) -> Tensor:
        where: Any = {"layout": "balanced", "process_group": comm}
        return wrap_ring_attn_varlen_func(q, q, q, cu, cu, causal=True, **where)

    q = torch.randn(16, 2, 8)
    for ends in ([0, 32], [0, 3, 32], [0, 1, 2, 32], [0, 5, 9, 30, 32], [0, 0, 7, 7, 8, 32]):
        attend(q, torch.tensor(ends, dtype=torch.int32))
    assert counter.frame_count <= 2
