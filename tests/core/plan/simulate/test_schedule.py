"""The simulation has the executor's events, in the executor's order, on every rank."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from host_cases import drawn_plan

from customized_ops.ring_attention.core.comm.inprocess import InProcessComm, run_ranks
from customized_ops.ring_attention.core.kernels import (
    KERNELS,
    BackwardOperands,
    ForwardOperands,
    Scoring,
)
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.core.plan.cost_model import H200_NCCL
from customized_ops.ring_attention.core.plan.heads import Sizes
from customized_ops.ring_attention.core.plan.simulate import simulate
from customized_ops.ring_attention.core.plan.simulate.ranks import Ranks
from customized_ops.ring_attention.core.run.executor import attention_backward, attention_forward

SIZES = Sizes(4, 2, 8, 8, 8)
# Of a rank: "send" with the bytes that it sends and receives, "wait" with those that it receives,
# and "attend".
Events = dict[int, list[tuple[Any, ...]]]


def executed(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Events:
    """What the executor does on each rank, in a forward and a backward in fp64."""
    events: Events = defaultdict(list)
    start = InProcessComm.start

    def nbytes(messages: dict[int, list[torch.Tensor]]) -> int:
        return sum(m.nbytes for each in messages.values() for m in each)

    def noted_start(comm: InProcessComm, send: Any, receive: Any) -> Callable[[], None]:
        moved = nbytes(send), nbytes(receive)
        if any(moved):
            events[comm.rank].append(("send", *moved))
        finish = start(comm, send, receive)

        def noted_finish() -> None:
            if moved[1]:
                events[comm.rank].append(("wait", moved[1]))
            finish()

        return noted_finish

    monkeypatch.setattr(InProcessComm, "start", noted_start)

    def body(comm: InProcessComm) -> None:
        def noted(function: Callable[..., Any]) -> Callable[..., Any]:
            def called(*given: Any, **options: Any) -> Any:
                events[comm.rank].append(("attend",))
                return function(*given, **options)

            return called

        reference = KERNELS["reference"]
        kernel = SimpleNamespace(
            forward=noted(reference.forward), backward=noted(reference.backward)
        )
        rows, keys = plan.q_layout.sizes[comm.rank], plan.k_layout.sizes[comm.rank]
        q = torch.randn(1, rows, SIZES.q_heads, SIZES.head_dim, dtype=torch.float64)
        k = torch.randn(1, keys, SIZES.kv_heads, SIZES.head_dim, dtype=torch.float64)
        out, lse = attention_forward(plan, comm, kernel, ForwardOperands(q, k, k), Scoring(0.3))
        given = BackwardOperands(out, q, k, k, out, lse)
        attention_backward(plan, comm, kernel, given, Scoring(0.3))

    run_ranks(plan.group_size, body)
    return events


def simulated(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Events:
    """The same of the simulation, with messages."""
    events: Events = defaultdict(list)
    kept: list[Any] = []  # so that no two batches have one id
    # Bytes that each rank sends in a batch, and receives as long as it has not waited for them.
    of_batches: dict[int, Any] = {}

    def note_send(moved: Any) -> None:
        for rank in range(plan.group_size if moved is not None else 0):
            if moved[:, rank].any():
                events[rank].append(("send", *moved[:, rank].tolist()))

    class NotedRanks(Ranks):
        @contextmanager
        def together(self) -> Iterator[None]:
            outer = self._batch
            with super().together():
                batch = self._batch
                yield
            if outer is None:
                note_send(of_batches.get(id(batch.at)))

        def send(self, what: str, stage: int, messages: Any) -> Any:
            arrival = super().send(what, stage, messages)
            moved = of_batches.setdefault(
                id(arrival.batch.at), np.zeros((2, plan.group_size), dtype=int)
            )
            kept.append(arrival)
            for way, side in enumerate((messages.sender, messages.receiver)):
                np.add.at(moved[way], side, messages.nbytes.astype(int))
            if self._batch is None:
                note_send(moved)
            return arrival

        def wait(self, stage: int, *arrivals: Any, by: Any = None) -> None:
            for arrival in arrivals:
                received = of_batches[id(arrival.batch.at)][1]
                waiting = received * (True if by is None else by)
                for rank in np.flatnonzero(waiting).tolist():
                    events[rank].append(("wait", int(received[rank])))
                    received[rank] = 0
            super().wait(stage, *arrivals, by=by)

        def attend(self, what: str, stage: int, seconds: Any) -> None:
            for rank in np.flatnonzero(seconds).tolist():
                events[rank].append(("attend",))
            super().attend(what, stage, seconds)

        def begin_local(self, seconds: Any) -> None:
            for rank in np.flatnonzero(seconds).tolist():
                events[rank].append(("attend",))
            super().begin_local(seconds)

    monkeypatch.setattr(f"{simulate.__module__}.Ranks", NotedRanks)
    simulate(plan, SIZES, replace(H200_NCCL, topology=plan.topology))
    return events


def check(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    done, said = executed(plan, monkeypatch), simulated(plan, monkeypatch)
    assert done == said


@pytest.mark.thin(2)
@pytest.mark.parametrize("seed", range(24))
def test_events_of_drawn_plans(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(drawn_plan(random.Random(seed)), monkeypatch)


@pytest.mark.parametrize("stages", [0, 1, 3])
@pytest.mark.parametrize("options", [{"head_groups": 2}, {"team_size": 2}], ids=str)
def test_events_of_parts_of_heads(
    stages: int, options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    mask, layout = AttnMask.causal(64), Layout.contiguous(64, 4)
    check(make_plan(mask, layout, stages=stages, heads=(4, 2), **options), monkeypatch)
