"""Messages that leave together."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from executed import Shape, check
from host_cases import drawn_plan

from customized_ops.ring_attention.core.comm.comm_groups import FakeComm
from customized_ops.ring_attention.core.comm.inprocess import InProcessComm
from customized_ops.ring_attention.core.comm.outbox import Batch


class Counting(FakeComm):
    """Rank 0 of 4, which notes what it starts and waits for."""

    def __init__(self) -> None:
        super().__init__(0, 4)
        self.events: list[Any] = []

    def start(self, send: Any, receive: Any) -> Callable[[], None]:
        sizes = [
            {peer: [len(t) for t in m] for peer, m in side.items()} for side in (send, receive)
        ]
        self.events.append(("start", *sizes))
        return lambda: self.events.append("wait")


def of(*sizes: int) -> list[torch.Tensor]:
    return [torch.zeros(n) for n in sizes]


def test_a_batch_is_one_start_and_one_wait() -> None:
    comm = Counting()
    batch = Batch(comm)
    first = batch.add({1: of(3, 4)}, {2: of(5)})
    second = batch.add({1: of(6), 3: of(7)}, {2: of(8), 3: of(9)})
    assert first == second and comm.events == []
    with pytest.raises(AssertionError, match="waited for before they have left"):
        first()
    batch.leave()
    assert comm.events == [("start", {1: [3, 4, 6], 3: [7]}, {2: [5, 8], 3: [9]})]
    first()
    second()
    assert comm.events[1:] == ["wait"]


def test_an_empty_batch_starts_nothing() -> None:
    comm = Counting()
    with comm.together(), comm.together():
        pass
    batch = Batch(comm)
    wait = batch.add({}, {})
    batch.leave()
    wait()
    assert comm.events == []


def test_after_an_error_nothing_is_sent_and_the_next_batch_is_a_new_one() -> None:
    comm = Counting()
    with pytest.raises(ValueError, match="planned"), comm.together():
        assert comm._batch is not None
        comm._batch.add({1: of(1)}, {})
        raise ValueError("planned")
    assert comm.events == [] and comm._batch is None
    with comm.together():
        comm._batch.add({2: of(2)}, {})
    assert comm.events == [("start", {2: [2]}, {})]


@pytest.mark.parametrize("seed", range(2))
def test_relayed_keys_take_few_batches(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each exchange of relayed keys about one in the forward and two in the backward, where
    they come and go by three ways."""
    source = random.Random(seed)
    plan = next(
        plan
        for plan in iter(lambda: drawn_plan(source), None)
        if plan.relays and not plan.rows_move and plan.few_at_once and plan.n_stages > 3
    )
    starts = [0] * plan.group_size
    start = InProcessComm.start

    def counting(comm: InProcessComm, send: Any, receive: Any) -> Callable[[], None]:
        starts[comm.rank] += 1
        return start(comm, send, receive)

    monkeypatch.setattr(InProcessComm, "start", counting)
    check(plan, Shape().draw(plan.mask, seed))
    groups = min(plan.head_groups, Shape().heads[1])
    for rank, count in enumerate(starts):
        exchanges = groups * len(plan.rank(rank).key_exchanges)
        assert count <= 3 * exchanges + 5
