"""Sequences in another order: the same function, with nothing permuted between the layers."""

from __future__ import annotations

import functools
import json
import re
from typing import Any
from unittest import mock

import hoist_models
import pytest
import torch
from dense import assert_same
from dropout_jobs import OneProcess
from hoist_models import FORMS, Model, inputs, scalar
from ranks import Pool, worlds
from steps import assert_gradients

from annotations import ComputeConfig, parallelize, record_of
from annotations.engines.torch.capture.capture import Captured, capture
from annotations.engines.torch.permute.label_shift import whole_logits
from annotations.engines.torch.permute.permuted_graph import permuted
from annotations.engines.torch.permute.sequence_permutation import choose_permutations
from annotations.engines.torch.rates import Link, Rates

ALWAYS = {"hoist": True}
# Activations of these models are a few bytes; a slow link lets them be what costs.
SLOW_LINK = Rates(links=(Link(bytes_per_second=1e6),))


def run(captured: Captured, module: torch.nn.Module, given: dict[str, torch.Tensor]) -> Any:
    """A captured graph on one rank."""
    values = []
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            if (name := captured.attributes.get(node.name)) is not None:
                owner, _, leaf = name.rpartition(".")
                values.append(getattr(module.get_submodule(owner), leaf))
            else:
                values.append(captured.constants.get(node.name, given.get(node.name)))
    graph = torch.fx.GraphModule(torch.nn.Module(), captured.graph)
    results = torch.fx.Interpreter(graph).run(*values)
    return results[0] if len(results) == 1 else results


def hoisted(
    module: torch.nn.Module,
    given: dict[str, torch.Tensor],
    parts: int,
    settings: dict[str, Any],
    rates: Rates = SLOW_LINK,
) -> tuple[Captured, list[str]]:
    """Captured and rewritten as over ``parts`` ranks that "cp" cuts it over; the plan's notes."""
    captured = capture(module, given)
    whole_logits(captured.graph)
    rules = {n.name: record_of(n.target) for n in captured.graph.nodes}
    cuts = {n: "l" for n, r in rules.items() if r is not None and "l" in r.rule.orders}
    found, notes = choose_permutations(captured, cuts, parts, rates, settings)
    return functools.reduce(permuted, found, captured), notes


def moves(note: str) -> tuple[list[str], list[str]]:
    """What a note says is permuted, to the order and back."""
    note = re.sub(r" \(.*?\)", "", note)
    there, _, back = note.partition("permuted once at: ")[2].partition("; natural order again at: ")
    return there.split(", "), back.split(", ") if back else []


def selects(captured: Captured) -> int:
    ops = torch.ops.aten.index_select.default, torch.ops.seqshard.to_order.default
    return sum(node.target in ops for node in captured.graph.nodes)


def stem(name: str) -> str:
    return name.rstrip("_0123456789").removesuffix("_default")


@pytest.mark.thin(8)
@pytest.mark.parametrize("form", FORMS)
def test_one_rank_computes_the_same(form: str) -> None:
    """All of a rewritten graph on one rank, attention told of the order; its gradients too."""
    length, there, back = 18, *FORMS[form]
    given, module, other = inputs(form, length), Model(form, length), Model(form, length)
    captured, [note] = hoisted(other, given, 3, ALWAYS)
    said = moves(note)
    assert sorted(map(stem, said[0])) == sorted(map(stem, there)), note
    assert list(map(stem, said[1])) == back
    assert selects(captured) == len(there) + len(back)
    expected, result = scalar(module(**given)), scalar(run(captured, other, given))
    expected.backward()
    result.backward()
    assert abs(result.item() - expected.item()) < 1e-10
    for (name, a), b in zip(module.named_parameters(), other.parameters(), strict=True):
        assert a.grad is not None
        assert_same(name, b.grad, a.grad)


def test_an_op_that_cares_for_order_between_the_layers() -> None:
    """A convolution gets natural order; where that costs more than it spares, everything does."""
    given, module = inputs("convolution", 18), Model("convolution", 18)
    slow = Rates(attention_flops_per_second=3e7, memory_bytes_per_second=1e7)
    captured, [note] = hoisted(module, given, 3, {}, slow)
    assert note.startswith("layout: zigzag over 18 tokens would spare ")
    assert "but permuting " in note and note.endswith("; kept natural order")
    assert selects(captured) == 0
    captured, [note] = hoisted(module, given, 3, ALWAYS)
    there, back = moves(note)
    assert "(in blocks.0" in note and len(there) > 1 and selects(captured) == len(there + back)
    expected, result = (scalar(f) for f in (module(**given), run(captured, module, given)))
    assert abs(result.item() - expected.item()) < 1e-10


def test_dropout_between_the_layers() -> None:
    """It is drawn by place; where to go back for it costs more than it spares, nothing moves."""
    given = inputs("dropout", 18)
    slow = Rates(attention_flops_per_second=3e7, memory_bytes_per_second=1e7)
    notes = []
    for form in ("plain", "dropout"):
        captured, [note] = hoisted(Model(form, 18), given, 3, {}, slow)
        notes.append(note)
    assert "permuted once at: " in notes[0]
    assert notes[1].startswith("layout: zigzag over 18 tokens would spare ")
    assert notes[1].endswith("; kept natural order") and selects(captured) == 0


def test_never() -> None:
    captured, notes = hoisted(Model("plain", 18), inputs("plain", 18), 3, {"hoist": False})
    assert notes == [] and selects(captured) == 0


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"hoist": 1}, ValueError, r"pas_config\['hoist'\] must be True or False, got 1"),
        ({"stages": 2}, NotImplementedError, r"pas_config\['stages'\]=2 is not supported by"),
    ],
)
def test_settings(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    config = ComputeConfig(1, 1, pas_config=settings)
    with pytest.raises(error, match=message):
        parallelize(torch.nn.Linear(2, 2), {"input": torch.ones(2)}, "cp", config, engine="torch")


def check(pool: Pool, form: str, length: int, settings: dict[str, Any], policy: Any = "cp") -> str:
    """Compare a step on real ranks with one process; returns the plan's text."""
    model = Model(form, length)
    torch.manual_seed(hoist_models.SEED)
    seed = int(torch.randint(2**63 - 1, ()))
    with mock.patch.object(torch.nn.functional, "dropout", OneProcess(seed, copy=0)):
        loss = scalar(model(**inputs(form, length)))
    loss.backward()
    replies = pool.run(hoist_models.step, form, length, settings, policy)
    for rank, (got, grads, _, _, planned) in enumerate(replies):
        assert abs(got - loss.item()) < 1e-10
        assert all(p.grad is not None for p in model.parameters())
        assert_gradients(f"rank {rank}", grads, model)
        # What attention moves is what was planned for the order; a mask is not known when planning.
        most = tuple(max(reply[3][n] for reply in replies) for n in (0, 1))
        assert most == planned or form in ("masks", "cross")
    return replies[0][2]


@pytest.mark.slow
def test_losses(two_ranks: Pool) -> None:
    plan = check(two_ranks, "losses", 18, ALWAYS)
    assert "layout: zigzag over 18 tokens, permuted once at: tokens, " in plan


@pytest.mark.slow
@worlds(cpus=[4])
@pytest.mark.parametrize("length", [14])
def test_even_and_uneven_parts(ranks: Pool, length: int) -> None:
    """Even parts are even work. Nothing moves outside attention that is as large as tokens are,
    and inside no row."""
    plan = check(ranks, "plain", length, ALWAYS)
    assert f"layout: zigzag over {length} tokens, permuted once at: tokens, arange, " in plan
    assert "q rows" not in plan and f" of [2, {length}, " not in plan
    if length % 8 == 0 and ranks.size == 4:
        assert "imbalance" not in plan


@pytest.mark.slow
def test_several_masks(two_ranks: Pool) -> None:
    """Causal, a window, and a prefix, told of one order."""
    assert "layout: " in check(two_ranks, "masks", 18, ALWAYS)


@pytest.mark.slow
def test_cross_attention(two_ranks: Pool) -> None:
    plan = check(two_ranks, "cross", 18, ALWAYS)
    assert "permuted once at: tokens, arange, " in plan and "lq / 2" in plan


@pytest.mark.slow
@worlds(cpus=[2])
def test_results_come_in_natural_order(ranks: Pool) -> None:
    assert "; natural order again at: linear" in check(ranks, "logits returned", 17, ALWAYS)


@pytest.mark.slow
def test_dropout_in_another_order(two_ranks: Pool) -> None:
    """It drops the same tokens' elements, in natural order again."""
    plan = check(two_ranks, "dropout", 18, ALWAYS)
    assert "layout: zigzag over 18 tokens, permuted once at: " in plan
    assert "; natural order again at: " in plan


@pytest.mark.slow
@worlds(cpus=[4], gpus=[4])
def test_on_two_axes(ranks: Pool) -> None:
    """The sequence along the first, heads along the second."""
    settings = ALWAYS | {"mesh_shape": (2, 2)}
    plan = check(ranks, "plain", 18, settings, {"ring_attn": ("l", "qh")})
    assert "layout: zigzag over 18 tokens, permuted once at: tokens, arange, " in plan
    assert "l / 2, qh / 2" in plan


@pytest.mark.slow
def test_a_plan_of_another_order_given_back(two_ranks: Pool) -> None:
    for first, second in two_ranks.run(hoist_models.given_back, "plain", 18, ALWAYS):
        assert json.loads(first)["hoisted"] and "layout: zigzag over 18" in first
        assert second == first
