"""The chunked loss inside graphs: torch.compile, torch.export, opcheck; second derivatives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import loss_jobs
import pytest
import torch
from dense import assert_same
from loss_cases import LossCase, expected, results
from ranks import Pool
from torch import Tensor

from annotations.registry import registered_ops
from customized_ops.chunk_linear_cross_entropy import chunk_linear_cross_entropy

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
