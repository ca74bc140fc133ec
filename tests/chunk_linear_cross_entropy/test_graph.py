"""The chunked loss inside graphs: torch.compile, torch.export, opcheck; second derivatives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import loss_jobs
import pytest
import torch
from dense import assert_same
from loss_cases import WHOLE, LossCase, Place, expected, parts_of, results
from ranks import Pool
from torch import Tensor

from annotations.registry import registered_ops
from customized_ops.chunk_linear_cross_entropy import chunk_linear_cross_entropy, op
from customized_ops.chunk_linear_cross_entropy.chunks import gradients
from customized_ops.ring_attention.core.comm.inprocess import run_ranks

CASE = LossCase((2, 7), bias=True, softcap=1.5)
OPS = {n: r for n, r in registered_ops().items() if "chunk_linear_cross_entropy" in n}
NUMBERS = (-100, 0.0, 3, 11, "", True)  # ignore_index ... reduce_hidden


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_compiles_whole(reduction: str) -> None:
    case = replace(CASE, reduction=reduction)
    compiled = torch.compile(case.call, fullgraph=True, backend="aot_eager")
    for got, want in zip(
        results(case, compiled, case.tensors(), case.upstream()), expected(case), strict=True
    ):
        assert_same("compiled", got, want)


def test_compiles_with_open_sizes() -> None:
    compiled = torch.compile(
        lambda h, w, t: chunk_linear_cross_entropy(h, w, t),
        fullgraph=True,
        backend="aot_eager",
        dynamic=True,
    )
    for tokens in (5, 8):
        hidden, weight, target, _ = LossCase((2, tokens)).tensors()
        want = chunk_linear_cross_entropy(hidden, weight, target)
        assert_same("dynamic", compiled(hidden, weight, target), want)


@pytest.mark.covering(1)
@pytest.mark.parametrize("learning", ["h", "w", "b", "hw", "wb", "hb", "hwb"])
@pytest.mark.parametrize("compiled", [False, True])
def test_only_gradients_that_are_needed_are_computed(
    monkeypatch: pytest.MonkeyPatch, learning: str, compiled: bool
) -> None:
    asked = []

    def recorded(*args: Any) -> Any:
        asked.append(args[-1])
        return gradients(*args)

    monkeypatch.setattr(op, "gradients", recorded)
    hidden, weight, target, bias = CASE.tensors()
    leaves = dict(zip("hwb", (hidden, weight, bias), strict=True))
    for name in learning:
        leaves[name].requires_grad_()
    torch.compiler.reset()
    call = torch.compile(CASE.call, backend="aot_eager") if compiled else CASE.call
    outs = call(hidden, weight, target, bias)
    sum((o * d).sum() for o, d in zip(outs, CASE.upstream(), strict=True)).backward()
    assert asked == [tuple(name in learning for name in "hwb")]
    for (name, leaf), want in zip(leaves.items(), expected(CASE)[2:], strict=True):
        if name in learning:
            assert_same(name, leaf.grad, want)
        else:
            assert leaf.grad is None


@pytest.mark.parametrize("places", ["1 R 1 R", "R 0 R 0"])
def test_frozen_dtensors(two_ranks: Pool, places: str) -> None:
    case = replace(CASE, reduction="sum")
    hidden, weight, target, bias = case.tensors()
    loss, _ = case.dense(hidden.requires_grad_(), weight, target, bias)
    (want,) = torch.autograd.grad(loss, hidden)
    for asked, shapes, grad in two_ranks.run(loss_jobs.frozen_dtensor, CASE, places.split()):
        assert asked == [(True, False, False)]
        assert shapes == [(2, 7, 5), None, None]
        assert_same("hidden", grad, want)


def test_a_rank_that_needs_no_gradient_still_adds_it_up() -> None:
    """Of hidden: the other rank would wait for it."""

    def call(comm: Any) -> Any:
        given, douts, where = parts_of(CASE, WHOLE, Place(comm.rank, 2, comm))
        hidden, weight, target, bias = given
        hidden.requires_grad_(comm.rank == 0)
        outs = CASE.call(hidden, weight.requires_grad_(), target, bias, **where)
        sum((o * d).sum() for o, d in zip(outs, douts, strict=True)).backward()
        return hidden.grad

    first, second = run_ranks(2, call)
    assert second is None
    assert_same("hidden", first, expected(CASE)[2])


@pytest.mark.parametrize("cut", ["tokens", "vocab"])
def test_groups_travel_through_a_compiled_graph(two_ranks: Pool, cut: str) -> None:
    for compiled, eager in two_ranks.run(loss_jobs.compiled_groups, CASE, cut):
        for got, want in zip(compiled, eager, strict=True):
            assert_same(cut, got, want)


def test_exports_as_one_node() -> None:
    class Model(torch.nn.Module):
        def forward(self, hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
            return chunk_linear_cross_entropy(hidden, weight, target)

    graph = torch.export.export(Model(), CASE.tensors()[:3], strict=False).graph
    nodes = [n for n in graph.nodes if getattr(n.target, "namespace", "") == "seqshard"]
    assert [n.target._opname for n in nodes] == ["chunk_linear_cross_entropy"]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_opcheck(bias: bool, dtype: torch.dtype) -> None:
    tensors = [
        t.requires_grad_() if t is not None and t.is_floating_point() else t
        for t in replace(CASE, bias=bias, dtype=dtype).tensors()
    ]
    # Two dtypes' results differ in rounding: the compiled form is compared in fp64 alone.
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    tests += ["test_aot_dispatch_dynamic"] if dtype == torch.float64 else []
    record = OPS["seqshard::chunk_linear_cross_entropy"]
    torch.library.opcheck(record.forward, (*tensors, *NUMBERS), test_utils=tests)


def test_opcheck_of_the_count() -> None:
    record = OPS["seqshard::chunk_linear_cross_entropy_tokens"]
    torch.library.opcheck(record.forward, (CASE.tensors()[2], -100, ""))
    assert len(OPS) == 2


def test_second_derivatives_are_refused() -> None:
    hidden, weight, target, _ = CASE.tensors()
    hidden.requires_grad_()
    loss = chunk_linear_cross_entropy(hidden, weight, target)
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives are not supported"):
        grad.sum().backward()
