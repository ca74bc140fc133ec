"""CONTRIBUTING's recipes, followed: what each adds is planned, cut and differentiated at once."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dense import assert_same, dense_gradients
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from annotations import ComputeConfig, parallel, parallelize, record_of, register_op
from customized_ops.ring_attention import (
    AttnMask,
    Layout,
    make_plan,
    run_ranks,
    wrap_masked_attn_func,
)
from customized_ops.ring_attention.core import layout_spec, work
from customized_ops.ring_attention.core.kernels import KERNELS, KernelError
from customized_ops.ring_attention.core.slices import Q0, Q1, Slices, as_slices, normalise

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
    assert {f"test_{recipe.lower().replace(' ', '_')}" for recipe in recipes} == here


def test_adding_a_mask() -> None:
    """A checkerboard of blocks, from slices."""

    def checkerboard(n: int, block: int) -> AttnMask:
        starts = range(0, n, block)
        rows = [
            (q, min(q + block, n), k, min(k + block, n), -n, n)
            for a, q in enumerate(starts)
            for b, k in enumerate(starts)
            if (a + b) % 2 == 0
        ]
        return AttnMask.from_slices(rows, n, n)

    assert checkerboard(3, 1).picture() == "x . x\n. x .\nx . x"
    i, j = np.indices((TOKENS, TOKENS)) // 5
    mask = checkerboard(TOKENS, 5)
    assert (mask.to_dense() == ((i + j) % 2 == 0)).all()
    check_attention(mask, Layout.contiguous(TOKENS, RANKS))


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


def test_adding_a_way_to_deal_work_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices in turn, whoever holds them."""
    tokens = 29  # of no other test: plans are remembered
    calls = []

    def in_turn(
        slices: Slices, q_layout: Layout, k_layout: Layout, team: int, cost: float
    ) -> work.Works:
        cuts = [
            (*row[:Q0], q, min(q + 5, row[Q1]), *row[Q1 + 1 :])
            for row in slices.tolist()
            for q in range(row[Q0], row[Q1], 5)
        ]
        calls.append(cost)
        parts = normalise(as_slices(cuts))
        teams = np.arange(len(parts)) % (q_layout.group_size // team)
        return [np.column_stack([parts, teams])]

    monkeypatch.setitem(work.ASSIGNMENTS, "in turn", in_turn)
    monkeypatch.setitem(work.ASSIGNMENTS, "auto", in_turn)  # what ops ask for
    mask, layout = AttnMask.causal(tokens), Layout.contiguous(tokens, RANKS)
    assert make_plan(mask, layout, assignment="in turn").area.sum() == mask.area
    check_attention(mask, layout)
    assert len(calls) > 1


def test_adding_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference under another name, for fp64 and no softcap."""
    calls: list[str] = []
    reference = KERNELS["reference"]

    def counted(what: str) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            calls.append(what)
            return getattr(reference, what)(*given, **options)

        return call

    able = SimpleNamespace(**vars(reference))
    able.NAME, able.forward, able.backward = "mine", counted("forward"), counted("backward")
    cpu = next(each for each in reference.CAPABILITIES if each.device == "cpu")
    able.CAPABILITIES = (type(cpu)("cpu", (torch.float64,), ("window", "lse gradient")),)
    monkeypatch.setitem(KERNELS, "mine", able)
    mask, layout = AttnMask.sliding_window(TOKENS, 5, 2), Layout.zigzag(TOKENS, RANKS)
    check_attention(mask, layout, kernel="mine")
    assert {"forward", "backward"} == set(calls)
    with pytest.raises(KernelError, match="has no softcap"):
        check_attention(mask, layout, kernel="mine", softcap=2.0)


@register_op("m k+, k+ n -> m n", name="recipes::project")
def project(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def test_adding_an_op() -> None:
    x, w = torch.randn(6, 4, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    assert_same("result", project(x, w), x @ w)
    assert torch.autograd.gradcheck(project, (x.requires_grad_(), w.requires_grad_()))
    record = record_of(torch.ops.recipes.project.default)
    assert record is not None
    bound = record.bind(record.arguments((x, w), {}))
    assert [split.identifier for split in bound.splits()] == ["m", "k", "n"]


class InPieces(TorchDispatchMode):
    """What the recipe's engine does: an op cut on what its annotation allows, a part at a time."""

    def __init__(self, parts: int, cut: str) -> None:
        super().__init__()
        self.parts, self.cut, self.done = parts, cut, 0

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        record = record_of(op)
        if record is None:
            return op(*args, **(kwargs or {}))
        arguments = record.arguments(args, kwargs or {})
        split = record.bind(arguments).split(self.cut)
        self.done += 1
        pieces = [
            value.chunk(self.parts, dim) if isinstance(dim, int) else [value] * self.parts
            for value, dim in zip(arguments.values(), split.inputs, strict=True)
        ]
        results = [op(*piece) for piece in zip(*pieces, strict=True)]
        (out,) = split.outputs
        return torch.cat(results, out) if isinstance(out, int) else sum(results)


class Pieces(nn.Module):
    """A module whose ops run in pieces."""

    def __init__(self, module: nn.Module, config: ComputeConfig, cut: str) -> None:
        super().__init__()
        self.module, self.mode = module, InPieces(config.plan_ngpus, cut)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.mode:
            return self.module(*args, **kwargs)


class Projects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return project(x, self.weight).square().sum()


@pytest.mark.parametrize("cut", ["m", "k", "n"])
def test_adding_an_engine(monkeypatch: pytest.MonkeyPatch, cut: str) -> None:
    engine = ModuleType("engine_of_the_recipe")

    def own(
        module: nn.Module, examples: Mapping[str, Any], policy: str, config: ComputeConfig
    ) -> nn.Module:
        return Pieces(module, config, policy)

    vars(engine).update(parallelize=own, as_config=lambda config: config)
    monkeypatch.setitem(sys.modules, engine.__name__, engine)
    monkeypatch.setitem(parallel.ENGINES, "pieces", engine.__name__)
    model, x = Projects(), torch.randn(6, 4, dtype=torch.float64)
    want = model(x)
    (grad,) = torch.autograd.grad(want, model.weight)
    made = parallelize(model, {"x": x}, cut, ComputeConfig(2, 2), engine="pieces")
    loss = made(x)
    assert made.mode.done == 1
    assert_same("loss", loss, want)
    assert_same("gradient", torch.autograd.grad(loss, model.weight)[0], grad)
