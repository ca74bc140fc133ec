"""Which layers run in which order, where attention gains by one and recurrent layers lose."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import recurrent_jobs
import torch
from recurrent_jobs import Hybrid

from annotations import ComputeConfig, record_of
from annotations.engines.torch import Link, Rates, plan_without_ranks
from annotations.engines.torch.capture.capture import capture
from annotations.engines.torch.permute import sequence_permutation
from annotations.engines.torch.permute.permutation_choice import PermutationChoice
from customized_ops.ring_attention import Layout, run_ranks
from customized_ops.ring_attention.op.tokens.sequence_order import (
    layout_of_order,
    to_order,
    zigzag_order,
)

PARTS = 4
RING = torch.ops.seqshard.ring_attn.default
LINK = Link(0.0, 1e8)
DELTA = "wrap_gated_delta_rule_func"


def chosen(
    layers: str, tokens: int, flops: float, link: Link, always: bool = False, known: Any = None
) -> tuple[PermutationChoice, list[str]]:
    """The choice for a model cut on its sequence, and the plan's notes. Attention and the delta
    rule run so many operations a second, and only what is moved takes time beside."""
    rates = Rates(attention_flops_per_second=flops, memory_bytes_per_second=1e12, links=(link,))
    with mock.patch.object(recurrent_jobs, "device", lambda: "cpu"):
        captured = capture(Hybrid(layers), recurrent_jobs.inputs(1, tokens))
    rules = {node.name: record_of(node.target) for node in captured.graph.nodes}
    cuts = {name: "l" for name, r in rules.items() if r is not None and "l" in r.rule.orders}
    seen: list[Any] = []
    say = sequence_permutation.notes_of

    def spy(choice: PermutationChoice, wanting: Any) -> list[str]:
        seen.append(choice)
        return say(choice, wanting)

    with mock.patch.object(sequence_permutation, "notes_of", spy):
        _, notes = sequence_permutation.choose_permutations(
            captured, cuts, PARTS, rates, {"hoist": True} if always else {}, known
        )
    return seen[0], notes


def sides(choice: PermutationChoice) -> str:
    """Of each layer that mixes tokens, whether it runs in the new order: z, or in natural order: n;
    a convolution and its recurrence are two."""
    return "".join("z" if choice.sides[node] else "n" for node in choice.gains)


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("tokens", "flops", "link", "expected"),
    [
        # Attention is nothing: all layers stay in natural order.
        (24, 1e9, Link(0.0, 1e8), "nnnnnnn"),
        # It is all, and to start a move takes long: one order for all.
        (240, 1e9, Link(1e-4, 1e8), "zzzzzzz"),
        # To move bytes takes long, and states have more than the hidden states of few tokens.
        (24, 1e7, Link(0.0, 1e7), "nnnnznn"),
        # Two layers before attention are worth a move, one behind it is not worth two.
        (240, 1e9, LINK, "nnnnzzz"),
    ],
)
def test_each_run_of_layers_takes_what_is_cheapest(
    tokens: int, flops: float, link: Link, expected: str
) -> None:
    choice, notes = chosen("ddad", tokens, flops, link)
    assert sides(choice) == expected
    # Of all ways to give each mixing layer an order, none is predicted to be faster.
    ways = itertools.product((False, True), repeat=len(choice.gains))
    forced = (dict(zip(choice.gains, way, strict=True)) for way in ways)
    least = min(replace(choice, forced=each).seconds for each in forced)
    assert choice.seconds == pytest.approx(least, abs=1e-12)
    natural = expected.count("n") - (expected[4] == "n")
    said = f"chosen: {natural} of 6 of these calls in natural order, {choice.seconds * 1e3:+.3g} ms"
    assert notes[1].endswith(said)
    assert f"natural for wrap_causal_conv1d_func and {DELTA} alone " in notes[1]
    made = [move for move in choice.made if move.seconds > 2e-5 + 2 * link.seconds]
    assert (len(made) > 0) == (set(expected) == {"n", "z"})


def test_always_is_for_those_that_want_an_order() -> None:
    """Attention runs in it then; what loses by it goes the way that is cheaper for it."""
    choice, notes = chosen("ddad", 24, 1e9, Link(0.0, 1e7), always=True)
    assert sides(choice) == "nnnnznn" and choice.seconds > 0
    assert "permuted once at: add_1 (in layers.1); natural order again at: " in notes[0]
    [gain] = (gain for node, gain in choice.gains.items() if choice.sides[node])
    assert choice.seconds == pytest.approx(sum(m.seconds for m in choice.made) - gain)


def test_what_is_declined_says_what_the_rest_would_take() -> None:
    choice, notes = chosen("ddad", 24, 1e9, Link(0.0, 1e9))
    said = r"would spare (\S+) ms a step .*, but permuting add_1 .* would take (\S+) ms; kept"
    found = re.search(said, notes[0])
    assert found is not None and 0 < float(found[1]) < float(found[2])
    forced = replace(choice, forced={node: node.target is RING for node in choice.gains})
    assert float(found[2]) - float(found[1]) == pytest.approx(forced.seconds * 1e3, rel=0.01)


@pytest.mark.slow
def test_what_is_chosen_is_what_the_whole_plan_spares() -> None:
    rates = Rates(attention_flops_per_second=1e9, memory_bytes_per_second=1e12, links=(LINK,))
    with mock.patch.object(recurrent_jobs, "device", lambda: "cpu"):
        given = recurrent_jobs.inputs(1, 240)
    natural, best = (
        plan_without_ranks(
            Hybrid("ddad"), given, "cp", ComputeConfig(PARTS, PARTS, pas_config=told)
        )
        for told in ({"rates": rates, "hoist": False}, {"rates": rates})
    )
    choice, notes = chosen("ddad", 240, 1e9, LINK)
    assert list(best.notes) == notes and best.in_order.keys() == {"240"}
    assert best.seconds - natural.seconds == pytest.approx(choice.seconds, rel=0.1)
    assert sum(n for row, n in best.rows if row.op == "to_order") == 1


def test_a_plan_made_before_keeps_its_orders() -> None:
    """At rates at which another choice is cheaper."""
    before, _ = chosen("ddad", 240, 1e9, LINK)
    known = {"240": [node.name for node in before.ways if before.sides[node]]}
    again, _ = chosen("ddad", 240, 1e9, Link(1e-4, 1e8), known=known)
    assert sides(before) == sides(again) == "nnnnzzz"
    assert [move.value.name for move in again.made] == [move.value.name for move in before.made]


def test_a_plan_of_an_older_version_is_taken() -> None:
    """It does not say which ops run in the order, and is given back without the settings."""
    link = Link(0.0, 1e7)
    rates = Rates(attention_flops_per_second=1e6, memory_bytes_per_second=1e12, links=(link,))
    with mock.patch.object(recurrent_jobs, "device", lambda: "cpu"):
        given, model = recurrent_jobs.inputs(2, 24), Hybrid("aa")
    told = ComputeConfig(2, 2, pas_config={"hoist": True, "rates": rates})
    plan = plan_without_ranks(model, given, "cp", told)
    again = plan_without_ranks(model, given, replace(plan, in_order={}), ComputeConfig(2, 2))
    assert again.in_order == plan.in_order and again.ops == plan.ops


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_tokens_to_an_order_and_back(ranks: int) -> None:
    """Values, gradients, and no more bytes than the rule says."""
    total = 23
    order = zigzag_order(total, ranks)
    spec = layout_of_order(order.tobytes()).spec
    x, weight = torch.randn(2, 2, total, 3, dtype=torch.float64)
    plain = Layout.contiguous(total, ranks)
    where = {"group": "", "total": total}
    given = {"x": x, "cu_seqlens": None, "order": spec, "dim": 1, "back": False, **where}

    def rank(comm: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        own, scale = (plain.shard(t, comm.rank, 1).requires_grad_() for t in (x, weight))
        before = comm.counters.received_bytes
        there = to_order(own, None, spec, 1, False, comm.name, total)
        count = comm.counters.received_bytes - before
        back = to_order(there, None, spec, 1, True, comm.name, total)
        (there * scale).sum().backward()
        assert own.grad is not None
        return there.detach(), back.detach(), own.grad, count

    there, back, grads, counts = zip(*run_ranks(ranks, rank), strict=True)
    assert torch.equal(torch.cat(there, 1), x[:, order])
    assert torch.equal(torch.cat(back, 1), x)
    assert torch.equal(torch.cat(grads, 1), weight[:, np.argsort(order)])
    record = to_order.record
    bound = record.bind(given)
    site = sequence_permutation.SplitSite("l", total, ranks, "")
    assert record.rule.cost(bound, site, given, 8).forward_bytes == max(counts)
