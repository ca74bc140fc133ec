"""Batches of documents with new lengths each: what the iterator gives, and when plans are made."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import re
import threading
import warnings
import weakref
from collections import deque
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from dense import assert_same
from packed_jobs import COSTS, counted, drawn, forget_batches, tensors
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

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

HEADS = (4, 2)


def documents(seed: int) -> list[list[int]]:
    """Some of no token, of one, and a long one."""
    draw = np.random.default_rng(seed)
    lengths = [*draw.integers(0, 12, draw.integers(1, 9)).tolist(), 1, int(draw.integers(20, 60))]
    return [draw.integers(1, 99, n).tolist() for n in draw.permutation(lengths)]


BATCHES = [documents(seed) for seed in range(12)]


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
        ({"costs": H200_NCCL}, r"costs=CostModel\(.*and the call is of costs="),
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
    monkeypatch.setattr(plan_value, "exchange", refuse)
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


def test_the_next_batch_is_made_while_one_is_used() -> None:
    made = threading.Semaphore(0)

    taken: list[int] = []

    def loader() -> Any:
        for n, batch in enumerate(BATCHES):
            taken.append(n)
            yield batch
            made.release()

    batches = packed_batches(loader(), ranks=2, rank=0, heads=HEADS, ahead=2)
    next(batches)
    for _ in range(2):
        assert made.acquire(timeout=30)
    assert len(taken) >= 3
    before = threading.active_count()
    batches.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before - 1
    assert len(taken) < len(BATCHES)


def test_workers_of_a_data_loader_plan_ahead() -> None:
    pack = PackDocuments(ranks=2, rank=1, heads=HEADS)
    loader = DataLoader(BATCHES[:4], batch_size=None, collate_fn=pack, num_workers=1)
    found = list(packed_batches(loader, ranks=2, rank=1, heads=HEADS))
    for batch, given in zip(found, BATCHES, strict=False):
        assert batch.tokens.tolist() == pack(given).tokens.tolist()
        assert make_plan(batch.plan.mask, batch.layout, heads=HEADS, team_size=None) is batch.plan
    assert len(found) == 4


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        ({"ranks": 4}, "ranks=4, but packed_batches was given ranks=2;"),
        ({"rank": 0}, "rank=0, but packed_batches was given rank=1;"),
        ({"heads": (4, 4)}, "heads=(4, 4), but packed_batches was given heads=(4, 2);"),
        ({"causal": False}, "causal=False, but packed_batches was given causal=True;"),
        (
            {"window_size": (3, -1), "layout": "contiguous"},
            "window_size=(3, -1), layout='contiguous', but packed_batches was given "
            "window_size=(-1, -1), layout='balanced';",
        ),
        ({"whole": True}, "whole=True, but packed_batches was given whole=False;"),
    ],
)
def test_batches_that_were_packed_otherwise_are_refused(
    packed: dict[str, Any], message: str
) -> None:
    asked: dict[str, Any] = {"ranks": 2, "rank": 1, "heads": HEADS}
    pack = pickle.loads(pickle.dumps(PackDocuments(**{**asked, **packed})))
    batches = packed_batches([pickle.loads(pickle.dumps(pack(BATCHES[0])))], **asked)
    with pytest.raises(ValueError) as error:
        next(batches)
    assert message in str(error.value)


def test_batches_of_other_rates_or_made_by_hand_are_passed_on() -> None:
    asked: dict[str, Any] = {"ranks": 2, "rank": 1, "heads": HEADS}
    with_rates = PackDocuments(2, 1, HEADS, costs=H200_NCCL)(BATCHES[0])
    by_hand = replace(PackDocuments(4, 1, HEADS)(BATCHES[0]), packed_by=None)
    given = [with_rates, by_hand]
    for batch, found in zip(given, packed_batches(given, **asked), strict=True):
        assert found is batch
    size = [len(pickle.dumps(batch)) for batch in (with_rates, replace(with_rates, packed_by=None))]
    assert size[0] - size[1] < 1000


PARTS = ("tokens", "targets", "positions", "cu_seqlens")


def test_a_data_loader_pins_what_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(id(copy := tensor.clone()))
        return copy

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    batch = PackDocuments(2, 1, HEADS)(BATCHES[0])
    found = pin_memory(batch, "cuda")  # what a DataLoader does with a batch
    assert [id(getattr(found, name)) for name in PARTS] == pinned
    assert all(torch.equal(getattr(found, name), getattr(batch, name)) for name in PARTS)
    assert found.layout is batch.layout and found.plan is batch.plan


def test_a_batch_on_a_device_arrives_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is "meta", which has no values to copy; zeros stand for them."""

    def on_host(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor

    monkeypatch.setattr(torch.Tensor, "cpu", on_host)
    batch = PackDocuments(2, 1, HEADS)(BATCHES[0])
    found = pickle.loads(pickle.dumps(batch.to("meta")))
    for name in PARTS:
        assert getattr(found, name).device.type == "cpu"
        assert getattr(found, name).shape == getattr(batch, name).shape
    assert torch.equal(found.cu_seqlens, batch.cu_seqlens)


@pytest.mark.gpu
def test_pinned_batches_of_a_data_loader() -> None:
    pack = PackDocuments(ranks=2, rank=1, heads=HEADS)
    given: dict[str, Any] = {"collate_fn": pack, "num_workers": 1, "pin_memory": True}
    loader = DataLoader(BATCHES[:2], batch_size=None, **given)
    for batch in packed_batches(loader, ranks=2, rank=1, heads=HEADS):
        assert all(getattr(batch, name).is_pinned() for name in PARTS)
        assert torch.equal(pickle.loads(pickle.dumps(batch.to("cuda"))).tokens, batch.tokens)


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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layout": "striped"}, "layout must be one of ('balanced', 'contiguous'), got 'striped'"),
        ({"layout": ["balanced"]}, "layout must be one of ('balanced', 'contiguous'), got ['bal"),
        ({"rank": 2}, "rank must be 0 to 1, got 2"),
        ({"rank": 0.5}, "rank must be 0 to 1, got 0.5"),
        ({"ranks": None}, "ranks must be a number of ranks, 1 or more, got None"),
        ({"costs": CostModel(topology=Topology((2, 2)))}, "of the hosts of 2 ranks, got '2x2'"),
        (
            {"costs": None},
            "costs must be a CostModel, such as group_costs(process_group), got None",
        ),
        ({"head_dim": (64, 64)}, "head_dim must be 1 or more, got (64, 64)"),
        ({"itemsize": 0}, "itemsize must be 1 or more, got 0"),
        ({"whole": "yes"}, "whole must be True or False, got 'yes'"),
        ({"ahead": 0}, "ahead must be an integer of at least 1, got 0"),
        ({"ahead": "2"}, "ahead must be an integer of at least 1, got '2'"),
        ({"loader": 5}, "loader must be a DataLoader, or other batches to iterate over, got 5"),
        ({"loader": [5]}, "documents must be a list of documents, got 5"),
        ({"loader": [[]]}, "a batch has no documents"),
        ({"loader": [[[1], [[2]]]]}, "documents[1] must be a row of integers, got int64 (1, 1)"),
        ({"loader": [[[0.5]]]}, "documents[0] must be a row of integers, got float64 (1,)"),
        (
            {"loader": [[([1, 2], 1)]]},
            "documents[0] must be a row of integers on the host, got ([1",
        ),
        (
            {"loader": [[torch.ones(3, device="meta", dtype=torch.int64)]]},
            "documents[0] must be a row of integers on the host, got tensor(",
        ),
    ],
)
def test_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        list(packed_batches(**{"loader": BATCHES, "ranks": 2, "rank": 0, "heads": HEADS} | given))
    assert str(error.value).startswith("packed_batches: ") and message in str(error.value)


@pytest.mark.parametrize("heads", [[4, 2], np.array([4, 2])], ids=str)
def test_heads_are_any_two_integers(heads: Any) -> None:
    batch = PackDocuments(2, 0, heads, window_size=[5, -1])(BATCHES[0])  # type: ignore[arg-type]
    pack = PackDocuments(2, 0, HEADS, window_size=(5, -1))
    assert batch.packed_by == pack and pack.take(batch) is batch
    mask, layout = batch.plan.mask, batch.layout
    assert make_plan(mask, layout, heads=heads, team_size=None) is batch.plan


@pytest.mark.parametrize("heads", [(4,), 4, "42", (4.0, 2), (4, 2, 1)], ids=str)
def test_other_heads_are_refused(heads: Any) -> None:
    said = re.escape(f"heads must be two integers, the query and the key heads, got {heads!r}")
    with pytest.raises(ValueError, match="packed_batches: " + said):
        next(packed_batches(BATCHES, ranks=2, rank=0, heads=heads))
    with pytest.raises(ValueError, match="make_plan: " + said):
        make_plan(AttnMask.causal(8), Layout.contiguous(8, 2), heads=heads)


def test_documents_of_one_token_have_no_target() -> None:
    batch = PackDocuments(2, 0, HEADS)([[3], [4], [5]])
    logits = torch.zeros(len(batch.tokens), 9)
    loss = torch.nn.functional.cross_entropy(logits, batch.targets, reduction="sum")
    assert batch.target_count == 0 and loss / max(batch.target_count, 1) == 0


def test_what_a_module_cannot_cut_is_refused() -> None:
    given: dict[str, Any] = {"ranks": 3, "rank": 0, "heads": HEADS}
    batches = packed_batches([[[1], [2]]], **given, whole=True)
    with pytest.raises(ValueError, match=r"a batch of 2 tokens cannot be cut over 3 ranks"):
        next(batches)
    assert next(packed_batches([[[1], [2]]], **given)).layout.total == 2


def test_what_the_loader_raises_is_raised() -> None:
    def loader() -> Any:
        yield BATCHES[0]
        raise OSError("the disk is gone")

    batches = packed_batches(loader(), ranks=2, rank=0, heads=HEADS)
    next(batches)
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)


def test_a_forked_worker_leaves_its_parents_plans_alone() -> None:
    """Their tables may lie on GPUs, which it may not free, however many plans it makes."""
    mask = AttnMask.causal(24)
    mine = make_plan(mask, Layout.contiguous(24, 2))
    receive, send = multiprocessing.get_context("fork").Pipe(duplex=False)

    def work() -> None:
        kept = len(plans._PLANS), mine in plans._OF_PARENTS[-1]
        again = make_plan(mask, Layout.contiguous(24, 2))
        send.send((*kept, again is mine, np.array_equal(again.work, mine.work)))

    worker = multiprocessing.get_context("fork").Process(target=work)
    worker.start()
    assert receive.poll(60) and receive.recv() == (0, True, False, True)
    worker.join()
