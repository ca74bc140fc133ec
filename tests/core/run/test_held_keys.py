"""Memory that a rank holds of others' keys, counted while the executor runs, is what plans say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from one_sided_memory import InProcessOneSided
from replay_cases import HEADS, calls, kernel
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from customized_ops.ring_attention.core.comm import inprocess
from customized_ops.ring_attention.core.comm.comm_groups import FakeComm
from customized_ops.ring_attention.core.comm.messages import Comm
from customized_ops.ring_attention.core.comm.packing.parcels import Parcels
from customized_ops.ring_attention.core.comm.pending import Pending
from customized_ops.ring_attention.core.kernels import (
    KERNELS,
    BackwardOperands,
    ForwardOperands,
    Scoring,
)
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.core.plan.choose import plan_request
from customized_ops.ring_attention.core.plan.cost_model import H200, H200_NCCL
from customized_ops.ring_attention.core.plan.heads import Sizes
from customized_ops.ring_attention.core.plan.report.hosts import host_figures
from customized_ops.ring_attention.core.run.executor import attention_backward, attention_forward
from customized_ops.ring_attention.core.topology import Topology

TOKENS, DIM = 64, 16  # of a rank, of a head
SHARDS = 4.0


class Absent(FakeComm):
    """A rank whose messages keep their buffers until they are waited for, as those of NCCL."""

    def start(self, send: Any, receive: Any) -> Callable[[], None]:
        def wait() -> None:
            assert send is not None and receive is not None

        return wait


class Held(TorchDispatchMode):
    """Bytes of the tensors that are made while something is fetched, at the most at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.fetching = 0, False
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.fetching and "new_empty" in str(func):
            storage = out.untyped_storage()
            self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
        self.most = max(self.most, sum(nbytes for _, nbytes in self._alive.values()))
        return out

    @contextmanager
    def counting(self, fetching: bool) -> Iterator[None]:
        before, self.fetching = self.fetching, fetching
        try:
            yield
        finally:
            self.fetching = before


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    mode = Held()

    def noted(owner: Any, name: str, fetching: bool = True) -> None:
        method = getattr(owner, name)

        def called(*given: Any, **options: Any) -> Any:
            with mode.counting(fetching):
                return method(*given, **options)

        monkeypatch.setattr(owner, name, called)

    noted(Comm, "_fetch")
    noted(Pending, "wait")
    noted(Pending, "go_on")
    noted(Parcels, "pack", fetching=False)  # copies of what leaves
    monkeypatch.setattr(plan_request, "HELD_BYTES", 1)
    return mode


def planned(hosts: tuple[int, ...], heads: tuple[int, int], groups: int | None) -> Plan:
    ranks = sum(hosts)
    # Rates of its own: plans of other tests are cached, of which few keys are no bound.
    costs = replace(H200_NCCL, topology=Topology(hosts), held_shards=SHARDS, memory_bytes=2.9e12)
    mask, layout = AttnMask.causal(ranks * TOKENS), Layout.zigzag(ranks * TOKENS, ranks)
    return make_plan(mask, layout, heads=heads, head_dim=DIM, head_groups=groups, costs=costs)


HOSTS = {"4 of 8": (8,) * 4, "16 of 1": (1,) * 16, "3 of 2": (2,) * 3, "4 of 4": (4,) * 4}


@pytest.mark.covering(1)
@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
@pytest.mark.parametrize(
    ("heads", "groups"), [((8, 8), 8), ((8, 8), 1), ((8, 4), 2), ((6, 3), None)]
)
def test_a_rank_holds_no_more_than_the_plan_says(
    hosts: tuple[int, ...], heads: tuple[int, int], groups: int | None, held: Held
) -> None:
    """Of keys, and of rows where these move, too, as on a grid."""
    plan, rank = planned(hosts, heads, groups), sum(hosts) // 3
    key_bytes = heads[1] * DIM * 2 * 4
    figure = host_figures(plan).received_bytes_at_once(Sizes(*heads, DIM, DIM, 4))
    assert 0 < figure <= SHARDS * TOKENS * key_bytes
    comm, kernel, scoring = Absent(rank, sum(hosts)), KERNELS["reference"], Scoring(0.25)
    q, k, v = (torch.randn(1, TOKENS, h, DIM) for h in (heads[0], heads[1], heads[1]))
    with held:
        out, lse = attention_forward(plan, comm, kernel, ForwardOperands(q, k, v), scoring)
    assert 0.4 * figure < held.most <= figure
    with held:
        given = BackwardOperands(out, q, k, v, out, lse)
        attention_backward(plan, comm, kernel, given, scoring)
    # Gradients that come home are made while they are waited for, too.
    assert held.most <= 2 * SHARDS * TOKENS * key_bytes


def test_rows_on_a_grid_count(held: Held) -> None:
    given = (8,) * 4, (8, 8), 8
    plan = planned(*given)
    assert plan.blocks > 1 and plan.rows_of_others > 0
    test_a_rank_holds_no_more_than_the_plan_says(*given, held)


@pytest.mark.parametrize("shards", [1.5, 2.0, 4.0])
@pytest.mark.parametrize(("heads", "groups"), [((8, 8), 1), ((8, 4), 2)])
@pytest.mark.parametrize("hosts", [(2, 2), (1, 2), (2, 1), (3, 1, 2)])
def test_copies_of_own_keys_come_on_top(
    hosts: tuple[int, ...], heads: tuple[int, int], groups: int, shards: float, held: Held
) -> None:
    """Those that a rank passes on: of two steps at a time. On every rank of a full mask."""
    ranks = sum(hosts)
    costs = replace(H200_NCCL, topology=Topology(hosts), held_shards=shards, memory_bytes=2.9e12)
    mask, layout = AttnMask.dense(ranks * TOKENS), Layout.contiguous(ranks * TOKENS, ranks)
    given: Any = {"heads": heads, "head_dim": DIM, "head_groups": groups, "assignment": "owner"}
    plan, key_bytes = make_plan(mask, layout, costs=costs, **given), heads[1] * DIM * 2 * 4
    figure = host_figures(plan).received_tokens_at_once
    assert 0 < figure <= shards * TOKENS
    for rank in range(ranks):
        crosses = [each.relay.cross for each in plan.exchanges(rank).kv if each and each.relay]
        own = [cross.received[rank].count if rank in cross.received else 0 for cross in crosses]
        copies = max(a + b for a, b in zip(own, own[1:] + own[:1], strict=True)) / groups
        held.most, comm = 0, Absent(rank, ranks)
        q, k, v = (torch.randn(1, TOKENS, h, DIM) for h in (heads[0], heads[1], heads[1]))
        call = comm, KERNELS["reference"], ForwardOperands(q, k, v), Scoring(0.25)
        with held:
            attention_forward(plan, *call)
        assert 0 < held.most <= (figure + copies) * key_bytes


@pytest.mark.parametrize("team_size", [1, 2])
def test_on_one_host_what_does_not_fit_is_bounded(
    team_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_request, "HELD_BYTES", 1)
    mask, layout = AttnMask.causal(16 * TOKENS), Layout.zigzag(16 * TOKENS, 16)
    others = 15 * TOKENS * (8 // team_size) * DIM * 2 * 2  # keys and values, in 16 bits

    def held_keys(**bounds: float) -> int:
        costs = replace(H200_NCCL, memory_bytes=2.8e12, **bounds)  # plans are kept by rates
        given: Any = {"heads": (8, 8), "head_dim": DIM, "costs": costs, "assignment": "owner"}
        return make_plan(mask, layout, team_size=team_size, **given).held_keys

    assert held_keys() == held_keys(gathered_bytes=others) == 0
    bounded = held_keys(held_shards=SHARDS)
    assert held_keys(gathered_bytes=others - 1) == bounded == SHARDS * TOKENS * team_size


@pytest.mark.parametrize("layout", [Layout.zigzag(64, 4), Layout.striped(64, 4, block=4)], ids=str)
def test_bounded_keys_come_by_messages(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where ranks write to one another: that memory would have a place for all of them."""
    monkeypatch.setattr(plan_request, "HELD_BYTES", 1)
    monkeypatch.setattr(inprocess, "InProcessComm", InProcessOneSided)
    mask = AttnMask.causal(64)
    ready: list[int] = []
    monkeypatch.setattr(InProcessOneSided, "expect_messages", lambda comm: ready.append(comm.rank))
    costs = replace(H200, held_shards=0.5, call_seconds=1.7e-4)
    plan = make_plan(mask, layout, heads=HEADS, costs=costs)
    assert plan.held_keys == 8 and len(plan.rank(3).stages) > 3
    bounded, free = (
        calls(each, kernel(recorded=False), 2)
        for each in (plan, make_plan(mask, layout, heads=HEADS))
    )
    for (found, (*_, arena)), (want, (*_, whole)) in zip(bounded, free, strict=True):
        assert arena == 0 < whole
        for mine, his in zip(found, want, strict=True):
            torch.testing.assert_close(mine, his, rtol=0, atol=1e-10)
    assert sorted(ready) == sorted([*range(4)] * 4), "each pass over bounded keys alone"
