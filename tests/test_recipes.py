"""CONTRIBUTING's recipes, followed: what each adds is planned, cut and differentiated at once."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import recipe_engine
import recipe_kernel
import recipe_op
import torch
from dense import assert_same, dense_gradients
from hypothesis import strategies as st
from op_cases import check_dense, expected, run_rank, same
from recipe_engine import InPieces, Projects
from recipe_op import BLOCK_ATTN, BlockCase, centre, project
from torch import Tensor

from annotations import ComputeConfig, parallel, parallelize, record_of
from annotations.codegen import public_call as calls
from annotations.rules import SplitSite
from customized_ops.ring_attention import (
    AttnMask,
    Layout,
    make_plan,
    public_calls,
    run_ranks,
    wrap_masked_attn_func,
)
from customized_ops.ring_attention.command_line.kernel_listing import DISTRIBUTIONS, listing
from customized_ops.ring_attention.core.kernels import KERNELS, Kernel, KernelError, refusal
from customized_ops.ring_attention.core.layout import layout_arguments as layout_spec
from customized_ops.ring_attention.core.mask.mask_arguments import count
from customized_ops.ring_attention.core.mask.slices import Q0, Q1, Slices, as_slices, normalise
from customized_ops.ring_attention.core.plan.choose import search
from tests.core.mask import test_pattern_errors, test_patterns
from tests.kernels import test_conformance
from tests.ops.masks import test_every_mask, test_mask_grid

TOKENS, RANKS = 24, 3


def check_attention(mask: AttnMask, layout: Layout, **options: Any) -> None:
    """Cut over in-process ranks, ``mask`` gives what dense attention gives."""
    torch.manual_seed(0)
    q, dout = torch.randn(2, 1, mask.q_len, 4, 8, dtype=torch.float64)
    k, v = torch.randn(2, 1, mask.k_len, 2, 8, dtype=torch.float64)

    def rank(group: Any) -> list[Tensor]:
        leaves = [layout.shard(t, group.rank).requires_grad_() for t in (q, k, v)]
        out = wrap_masked_attn_func(*leaves, mask, layout=layout, process_group=group, **options)
        out.backward(layout.shard(dout, group.rank))
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    parts = run_ranks(layout.group_size, rank)
    out, _, *gradients = dense_gradients(q, k, v, mask, 8**-0.5, dout)
    for n, want in enumerate((out, *gradients)):
        assert_same(f"result {n}", layout.unshard([part[n] for part in parts]), want)


def test_each_recipe_is_followed() -> None:
    text = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()
    recipes = re.findall(r"^## (Adding an? .*)\n\n1\. ", text, re.MULTILINE)
    here = {name for name in globals() if name.startswith("test_adding")}
    more = {"test_adding_an_attention_op", "test_adding_an_op_that_communicates"}
    assert {f"test_{recipe.lower().replace(' ', '_')}" for recipe in recipes} == here - more


def checkerboard(cls: type[AttnMask], n: int, block: int = 1) -> AttnMask:
    """Blocks of ``block`` tokens, every other of which attends.

        AttnMask.checkerboard(3)
        x . x
        . x .
        x . x

    Args:
        n: tokens. block: tokens of a block.
    Raises:
        MaskError: not such numbers.
    """
    n, block = count("n", n), count("block", block, 1)
    starts = range(0, n, block)
    rows = [
        (q, min(q + block, n), k, min(k + block, n), -n, n)
        for a, q in enumerate(starts)
        for b, k in enumerate(starts)
        if (a + b) % 2 == 0
    ]
    return cls.from_slices(rows, n, n)


checkerboard.__annotations__["return"] = "Self"


def test_adding_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttnMask, "checkerboard", classmethod(checkerboard), raising=False)
    # 1. Its picture is looked at.
    test_pattern_errors.test_docstring_pictures("checkerboard")
    # 2. Its formula; then what fails until there are bad arguments and a strategy.
    for block in (1, 5):
        i, j = np.indices((TOKENS, TOKENS)) // block
        test_patterns.check(AttnMask.checkerboard(TOKENS, block), (i + j) % 2 == 0)
    names = sorted([*test_pattern_errors.CONSTRUCTORS, "checkerboard"])
    monkeypatch.setattr(test_pattern_errors, "CONSTRUCTORS", names)
    with pytest.raises(AssertionError):
        test_pattern_errors.test_every_constructor_has_a_bad_call()
    bad = ("checkerboard(4, 0)", "block must be at least 1, got 0")
    monkeypatch.setattr(test_pattern_errors, "BAD", [*test_pattern_errors.BAD, bad])
    test_pattern_errors.test_every_constructor_has_a_bad_call()
    test_pattern_errors.test_errors_name_the_argument(*bad)
    with pytest.raises(AssertionError):
        test_every_mask.test_every_constructor_is_drawn()
    drawn = st.builds(AttnMask.checkerboard, test_every_mask.tokens, test_every_mask.block)
    monkeypatch.setitem(test_every_mask.MASKS, "checkerboard", drawn)
    test_every_mask.test_every_constructor_is_drawn()
    with pytest.raises(AssertionError):
        test_mask_grid.test_every_constructor_is_here()
    monkeypatch.setitem(test_mask_grid.MASKS, "checkerboard", AttnMask.checkerboard(20, 3))
    test_mask_grid.test_every_constructor_is_here()
    for ranks in (2, RANKS):
        check_attention(AttnMask.checkerboard(TOKENS, 5), Layout.contiguous(TOKENS, ranks))


def test_adding_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence backwards."""

    def backwards(total: int, group_size: int) -> Layout:
        cut = Layout.contiguous(total, group_size).ranges
        made = Layout.from_ranges(cut[::-1])
        return Layout(made.table, group_size, layout_spec.write("backwards", total, group_size))

    monkeypatch.setattr(Layout, "backwards", staticmethod(backwards), raising=False)
    monkeypatch.setitem(layout_spec.FORMS, "backwards", "backwards:TOTAL:RANKS")
    layout = backwards(TOKENS, RANKS)
    assert layout.positions(0).tolist() == list(range(16, 24))
    assert Layout.parse(layout.spec) == layout
    check_attention(AttnMask.causal(TOKENS), layout)


def test_adding_a_way_to_assign_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices in turn, whoever holds them."""
    tokens = 29  # of no other test: plans are remembered
    calls = []

    def in_turn(
        slices: Slices, q_layout: Layout, k_layout: Layout, team: int, cost: float
    ) -> search.Works:
        cuts = [
            (*row[:Q0], q, min(q + 5, row[Q1]), *row[Q1 + 1 :])
            for row in slices.tolist()
            for q in range(row[Q0], row[Q1], 5)
        ]
        calls.append(cost)
        parts = normalise(as_slices(cuts))
        teams = np.arange(len(parts)) % (q_layout.group_size // team)
        return [np.column_stack([parts, teams])]

    monkeypatch.setitem(search.ASSIGNMENTS, "in turn", in_turn)
    monkeypatch.setitem(search.ASSIGNMENTS, "auto", in_turn)  # what ops ask for
    mask, layout = AttnMask.causal(tokens), Layout.contiguous(tokens, RANKS)
    assert make_plan(mask, layout, assignment="in turn").area.sum() == mask.area
    check_attention(mask, layout)
    assert len(calls) > 1


def test_adding_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    # 1. The file, 2. the registry, which the tests of all kernels run over.
    kernel = cast(Kernel, recipe_kernel)
    monkeypatch.setitem(KERNELS, kernel.NAME, kernel)
    monkeypatch.setitem(DISTRIBUTIONS, kernel.NAME, "torch")
    assert re.search(r"^mine +torch ", listing(torch.device("cpu")), re.MULTILINE)
    cases = [case for group in test_conformance.grouped("cpu").values() for case in group]
    able = [case for case in cases if refusal(kernel, case.request("cpu")) is None]
    assert len(able) > 10
    test_conformance.test_conforms(kernel, able[:4], "cpu")
    with pytest.raises(KernelError, match="has no softcap"):
        check_attention(AttnMask.causal(8), Layout.zigzag(8, 2), kernel="mine", softcap=2.0)
    # 3. Through the stand-in of its library: over ranks as dense attention.
    calls = recipe_kernel.LIBRARY.calls
    for mask in (AttnMask.sliding_window(TOKENS, 5, 2), AttnMask.varlen([0, 9, TOKENS])):
        calls.clear()
        check_attention(mask, Layout.zigzag(TOKENS, 2), kernel="mine")
        assert len(calls) >= 4  # a forward and a backward on each rank


@pytest.mark.parametrize(
    "case",
    [
        BlockCase("blocks", TOKENS, block=5, heads=(4, 2), batch=2),
        BlockCase("blocks", TOKENS, block=3, layout="zigzag", sink=True, softcap=2.0),
        BlockCase("blocks", 20, block=4, sizes=(13, 7)),
    ],
    ids=["grouped", "zigzag", "uneven"],
)
def test_adding_an_attention_op(case: BlockCase, monkeypatch: pytest.MonkeyPatch) -> None:
    # 2. Declared, engines that generate code see it.
    monkeypatch.setattr(calls, "_calls", dict(calls._calls))
    monkeypatch.setattr(calls, "_listeners", [])
    calls.declare_call(public_calls._attention(recipe_op.wrap_block_attn_func, BLOCK_ATTN))
    call = calls._calls["recipe_op.wrap_block_attn_func"]
    q, k, v, _ = case.tensors()
    given = {"q": q, "k": k, "v": v, "block": case.block}
    bound_arguments = call.signature.bind(**given)
    bound_arguments.apply_defaults()
    bound, _ = call.shapes(bound_arguments.arguments, 2)
    assert {"b", "l"} <= {split.identifier for split in bound.splits()}
    # 3. Its cases: in process, and without a group.
    alone = run_rank(replace(case, layout=None, sizes=None), 0, 1, None)
    same(alone, expected(case))
    check_dense(case, 2)


def test_adding_an_op() -> None:
    x, w = torch.randn(6, 4, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(project, (x.requires_grad_(), w.requires_grad_()))
    record = record_of(torch.ops.recipes.project.default)
    assert record is not None
    bound = record.bind(record.arguments((x, w), {}))
    assert [split.identifier for split in bound.splits()] == ["m", "k", "n"]
    for cut in "mkn":  # on one part after the other, put together as the annotation says
        with InPieces(2, cut):
            assert_same(f"cut on {cut}", project(x.detach(), w.detach()), x @ w)


@pytest.mark.parametrize("cut", ["b", "l", "c"])
def test_adding_an_op_that_communicates(cut: str) -> None:
    x, dy = torch.randn(2, 2, 7, 4, dtype=torch.float64)
    record = record_of(torch.ops.recipes.centre.default)
    assert record is not None
    split = record.bind(record.arguments((x,), {})).split(cut)
    (dim,), (rule, size) = split.inputs[:1], (record.rule.communicates.get(cut), 7)
    assert rule is None or rule.cost is recipe_op.moved

    def rank(comm: Any) -> list[Tensor]:
        part, dout = (t.tensor_split([(t.shape[dim] + 1) // 2], dim)[comm.rank] for t in (x, dy))
        told = {} if rule is None else rule.arguments(SplitSite(cut, size, 2, comm.name, comm.rank))
        leaf = part.clone().requires_grad_()
        out = centre(leaf, **told)
        out.backward(dout)
        return [out.detach(), leaf.grad]

    leaf = x.clone().requires_grad_()
    want = leaf - leaf.mean(1, keepdim=True)
    want.backward(dy)
    for what, whole, parts in zip(
        ("out", "dx"),
        (want.detach(), leaf.grad),
        zip(*run_ranks(2, rank), strict=True),
        strict=True,
    ):
        assert_same(what, torch.cat(parts, dim), whole)


@pytest.mark.parametrize("cut", ["m", "k", "n"])
def test_adding_an_engine(monkeypatch: pytest.MonkeyPatch, cut: str) -> None:
    monkeypatch.setitem(parallel.ENGINES, "pieces", recipe_engine.__name__)
    model, x = Projects(), torch.randn(6, 4, dtype=torch.float64)
    want = model(x)
    (grad,) = torch.autograd.grad(want, model.weight)
    made = parallelize(model, {"x": x}, cut, ComputeConfig(2, 2), engine="pieces")
    loss = made(x)
    assert made.mode.done == 1
    assert_same("loss", loss, want)
    assert_same("gradient", torch.autograd.grad(loss, model.weight)[0], grad)
