"""Batches of documents with new lengths each: what the iterator gives, and when plans are made."""

from __future__ import annotations

import gc
import pickle
import re
import warnings
import weakref
from collections import deque
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from dense import assert_same
from packed_jobs import COSTS, counted, drawn, forget_batches, tensors

from customized_ops.ring_attention import (
    AttnMask,
    Layout,
    PackDocuments,
    PackedBatch,
    group_costs,
    packed_batches,
    run_ranks,
    wrap_ring_attn_varlen_func,
)
from customized_ops.ring_attention.core.comm.inprocess import InProcessComm
from customized_ops.ring_attention.core.kernels.window import library_calls
from customized_ops.ring_attention.core.plan import Plan, make_plan, plan_value
from customized_ops.ring_attention.core.plan import plan as plans
from customized_ops.ring_attention.core.plan.cost_model import H200_NCCL, CostModel
from customized_ops.ring_attention.core.run import call_pairs
from customized_ops.ring_attention.core.topology import Topology

from .packed_cases import BATCHES, HEADS


@pytest.mark.thin(2)
@pytest.mark.parametrize("layout", ["balanced", "contiguous"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_token_is_on_one_rank_with_its_target(
    ranks: int, layout: str, balanced_once: dict[Any, Layout]
) -> None:
    of_ranks = []
    for rank in range(ranks):
        if rank == 1:  # makes its own layouts, which must be those of rank 0
            balanced_once.clear()
            forget_batches()
        given = {"ranks": ranks, "rank": rank, "heads": HEADS, "layout": layout}
        of_ranks.append(list(packed_batches(BATCHES, **given)))
    for given, *batches in zip(BATCHES, *of_ranks, strict=True):
        lay = batches[0].layout
        assert all(batch.layout == lay for batch in batches)
        whole = {
            name: lay.unshard([getattr(batch, name) for batch in batches], dim=0).tolist()
            for name in ("tokens", "targets", "positions")
        }
        assert whole["tokens"] == [token for row in given for token in row]
        assert whole["targets"] == [t for row in given if row for t in (*row[1:], -100)]
        assert whole["positions"] == [n for row in given for n in range(len(row))]
        assert batches[0].cu_seqlens.tolist() == [0, *np.cumsum([len(row) for row in given])]
        assert batches[0].target_count == sum(len(row) - 1 for row in given if row)


def attend(comm: Any, batches: list[Any], whole: list[Any], name: str = "") -> list[Any]:
    """Attention over the batches that a rank is given; "balanced" asks for the layout by name."""
    results = []
    for batch, parts in zip(batches, whole, strict=True):
        q, k, v = (batch.layout.shard(t, comm.rank, dim=0).requires_grad_() for t in parts)
        out = wrap_ring_attn_varlen_func(
            q,
            k,
            v,
            batch.cu_seqlens,
            batch.cu_seqlens,
            causal=True,
            process_group=comm,
            layout=name if name == "balanced" else batch.layout,
        )
        out.square().sum().backward()
        results.append((out.detach(), q.grad, k.grad, v.grad))
    return results


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"head_dim": 128}, r"head_dims=\(128, 128\), and the call is of head_dims=\(8, 8\)"),
        ({"heads": (4, 4)}, r"heads=\(4, 4\), and the call is of heads=\(4, 2\)"),
        ({"itemsize": 4}, r"itemsize=4, and the call is of itemsize=2; give .* itemsize"),
        (
            {"costs": H200_NCCL},
            r"for link_bytes=310.*one_sided=False, and the call is of .*, one_sided=True; give",
        ),
        ({}, None),
    ],
    ids=["dims", "heads", "elements", "rates", "right"],
)
def test_a_plan_made_ahead_for_another_call_is_told(
    wrong: dict[str, Any], said: str | None, sent: bool
) -> None:
    forget_batches()
    made = {"heads": HEADS, "head_dim": 8, **wrong}
    of_ranks = [[PackDocuments(2, rank, **made)(BATCHES[1])] for rank in range(2)]
    if sent:
        of_ranks = pickle.loads(pickle.dumps(of_ranks))
    whole = [tensors(of_ranks[0][0], 0)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # once for each text
        run_ranks(2, lambda comm: attend(comm, of_ranks[comm.rank], whole))
    texts = [str(w.message) for w in caught if "plans again in the step" in str(w.message)]
    assert len(texts) == (said is not None)
    assert said is None or re.search(said, texts[0])


def test_a_plan_of_a_batch_says_what_all_of_it_took() -> None:
    plans._PLANS.clear()
    batch = PackDocuments(4, 1, HEADS)(BATCHES[0])
    seconds = batch.plan.planning_seconds
    plans._PLANS.clear()
    mask = AttnMask.varlen(batch.cu_seqlens.tolist(), causal=True)
    alone = make_plan(mask, batch.layout, heads=HEADS, team_size=None).planning_seconds
    assert seconds > alone > 0


@pytest.mark.usefixtures("balanced_once")
@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", ["balanced", "contiguous"])
@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("hosts", ["1x2", "1x4", "2x2", "3,1"])
def test_attention_finds_what_was_made_ahead(
    hosts: str, sent: bool, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a thread here, or in another process, and over several hosts; results are those of one
    device."""
    topology = Topology.parse(hosts)
    if len(topology.hosts) > 1:
        costs = CostModel(topology=topology, held_shards=4.0)
        monkeypatch.setattr(InProcessComm, "costs", costs)
    forget_batches()
    ranks = topology.size

    def packed(comm: Any) -> list[PackedBatch]:
        own = {"ranks": ranks, "rank": comm.rank, "costs": group_costs(comm), "layout": layout}
        return list(packed_batches(BATCHES, heads=HEADS, head_dim=8, **own))

    of_ranks = run_ranks(ranks, packed)
    if sent:
        bytes_of = pickle.dumps(of_ranks)
        del of_ranks
        forget_batches()
        of_ranks = pickle.loads(bytes_of)
        assert len(plans._PLANS) == len(BATCHES)
    whole = [tensors(batch, seed) for seed, batch in enumerate(of_ranks[0])]
    with counted() as counts:
        found = run_ranks(ranks, lambda comm: attend(comm, of_ranks[comm.rank], whole))
        by_name = run_ranks(ranks, lambda comm: attend(comm, of_ranks[comm.rank], whole, layout))
    assert counts == {"layouts": 0, "masks": 0, "plans": 0}
    for (out, *_), (other, *_) in zip(found[0], by_name[0], strict=True):
        assert torch.equal(out, other)
    for n, batch in enumerate(of_ranks[0]):
        q, k, v = (t.requires_grad_() for t in whole[n])
        cu = batch.cu_seqlens
        out = wrap_ring_attn_varlen_func(q, k, v, cu, cu, causal=True)
        out.square().sum().backward()
        expected = (out.detach(), q.grad, k.grad, v.grad)
        parts = zip(*(results[n] for results in found), strict=True)
        for name, one, each in zip(("out", "dq", "dk", "dv"), expected, parts, strict=True):
            assert_same(f"batch {n}, {name}", batch.layout.unshard(list(each), dim=0), one)


@pytest.mark.parametrize("layout", ["balanced", "contiguous"])
@pytest.mark.parametrize("rank", [0, 2])
def test_the_calls_of_a_library_travel_with_a_batch(
    rank: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the mask's class, and what the peers receive: a step only sends tables to the device. (No
    library of the CPU's takes windows.)"""
    pack = PackDocuments(3, rank, HEADS, layout=layout)
    made = [pack(documents) for documents in BATCHES]
    sent = pickle.dumps(made)
    plans._PLANS.clear()
    refuse = mock.Mock(side_effect=AssertionError("this was to be worked out ahead"))
    monkeypatch.setattr(call_pairs, "Pairs", refuse)
    monkeypatch.setattr(library_calls, "lower", refuse)
    monkeypatch.setattr(call_pairs, "shape_class", refuse)
    monkeypatch.setattr(plan_value, "exchanges", refuse)
    monkeypatch.setattr(plan_value, "exchanges_of_all", refuse)
    tables = 0
    for batch, before in zip(pickle.loads(sent), made, strict=True):
        assert batch.plan is not before.plan
        assert call_pairs.mask_class(batch.plan) == call_pairs.mask_class(before.plan)
        for peer in range(3):
            batch.plan.exchanges(peer).prepare()
        for n, stage in enumerate(batch.plan.rank(rank).stages):
            for remote in [
                side for side, own in ((False, stage.own), (True, stage.remote)) if len(own)
            ]:
                _, pairs = call_pairs.stage_pairs(batch.plan, rank, n, remote)
                _, expected = call_pairs.stage_pairs(before.plan, rank, n, remote)
                each = zip(library_calls.tables(pairs), library_calls.tables(expected), strict=True)
                for table, one in each:
                    tables += 1
                    assert np.array_equal(table.values, one.values)
    assert tables


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 2000), marks=pytest.mark.slow)], ids=len
)
@pytest.mark.filterwarnings("ignore:Layout.balanced")
def test_random_batches_equal_one_device(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    given_away, teams = 0, 0
    for seed in seeds:
        given, ranks, how = drawn(seed)
        costs = COSTS[seed % len(COSTS)]
        monkeypatch.setattr(InProcessComm, "costs", costs)
        of_ranks = [
            next(packed_batches([given], ranks=ranks, rank=rank, heads=HEADS, costs=costs, **how))
            for rank in range(ranks)
        ]
        plan = of_ranks[0].plan
        given_away += plan.rows_move and plan.team_size == 1
        teams += plan.team_size > 1
        lay, cu = of_ranks[0].layout, of_ranks[0].cu_seqlens
        whole = tensors(of_ranks[0], seed)
        masked = {"causal": how["causal"], "window_size": how["window_size"]}

        def step(comm: Any, lay: Layout = lay, given: Any = (whole, cu, masked)) -> Any:
            whole, cu, masked = given
            q, k, v = (lay.shard(t, comm.rank, dim=0).requires_grad_() for t in whole)
            where = {"process_group": comm, "layout": lay}
            out = wrap_ring_attn_varlen_func(q, k, v, cu, cu, **masked, **where)
            out.square().sum().backward()
            return out.detach(), q.grad, k.grad, v.grad

        q, k, v = (t.clone().requires_grad_() for t in whole)
        out = wrap_ring_attn_varlen_func(q, k, v, cu, cu, **masked)
        out.square().sum().backward()
        found = zip(*run_ranks(ranks, step), strict=True)
        expected = out.detach(), q.grad, k.grad, v.grad
        for name, one, parts in zip("odkv", expected, found, strict=True):
            assert_same(f"seed {seed}, {name}", lay.unshard(list(parts), dim=0), one)
    assert given_away > len(seeds) / 20 and (teams or len(seeds) < 100)


def test_a_plan_of_another_process_is_small_and_the_same() -> None:
    mask = AttnMask.varlen([0, 700, 900, 4096], causal=True)
    plan = make_plan(mask, Layout.balanced(mask, 4))
    plan.rank(1)
    plan.made["anything"] = torch.zeros(1 << 20)
    sent = pickle.dumps(plan)
    assert len(sent) < 20_000
    assert pickle.loads(sent) is plan, "where it is known it is itself"
    plans._PLANS.clear()
    again = pickle.loads(sent)
    assert again is not plan and not again.made
    assert str(again) == str(plan) and (again.work == plan.work).all()
    assert make_plan(mask, again.q_layout) is again


def test_plans_are_known_while_somebody_holds_them_and_the_last_ones_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plans, "_LAST", deque(maxlen=8))

    def made(n: int) -> Plan:
        return make_plan(AttnMask.causal(8 + n), Layout.contiguous(8 + n, 2))

    most = plans._LAST.maxlen
    assert most is not None
    held = [made(n) for n in range(3 * most)]
    assert all(made(n) is plan for n, plan in enumerate(held))
    kept = [weakref.ref(plan) for plan in held]
    held.clear()
    gc.collect()
    assert [plan() is not None for plan in kept] == [n >= 2 * most for n in range(3 * most)]
