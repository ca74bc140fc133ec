"""Memory for what ranks write to one another, and when they send messages instead."""

from __future__ import annotations

import threading
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import one_sided_memory
import pytest
import torch
from one_sided_memory import InProcessOneSided, SparingOneSided
from torch import Tensor

from customized_ops.ring_attention.core.comm import Comm
from customized_ops.ring_attention.core.comm.inprocess import run_ranks
from customized_ops.ring_attention.core.comm.one_sided.one_sided_comm import (
    SPARED_BYTES,
    SPARED_TOKENS,
    OneSidedComm,
)
from customized_ops.ring_attention.core.comm.transfer_side import ROWS
from customized_ops.ring_attention.core.kernels import KERNELS, ForwardOperands, Scoring
from customized_ops.ring_attention.core.plan import Plan
from customized_ops.ring_attention.core.run import forward_pass
from customized_ops.ring_attention.core.run.executor import attention_forward

from .passes import PLANS, connect, draw, passes


def arenas(
    plan: Plan, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], list[tuple[int, ...]]]:
    """Bytes of the arena that each rank used in a forward and in a backward, and the channels of
    each exchange of rank 0."""
    connect(monkeypatch, kind)
    used: list[int] = []
    channels: list[tuple[int, ...]] = []

    def watch(comm: Any) -> None:
        end, write = comm.end, comm._write

        def ended() -> None:
            used.append(comm.arena_bytes)
            end()

        def writing(ready: Any, source: Any) -> None:
            if comm.rank == 0:
                channels.append(ready.channels)
            write(ready, source)

        monkeypatch.setattr(comm, "end", ended)
        monkeypatch.setattr(comm, "_write", writing)

    passes(plan, torch.float32, begin=watch)
    return used[:: plan.group_size], channels


@pytest.mark.parametrize("name", PLANS)
def test_results_that_come_over_keys_take_no_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the last keys of a backward, that is: no other exchange waits for its peers."""
    plan = PLANS[name]
    written, plain = arenas(plan, InProcessOneSided, monkeypatch)
    sparing, channels = arenas(plan, SparingOneSided, monkeypatch)
    assert all(len(each) == 1 for each in plain)
    assert sum(len(each) > 1 for each in channels) == plan.keys_move
    if plan.keys_move:
        assert sparing[0] == written[0] and sparing[1] < written[1]
    else:
        assert sparing == written
    if name in ("zigzag", "scattered"):  # one stage of keys, and no rows
        assert sparing[1] == sparing[0]


def test_from_how_many_tokens_on_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert OneSidedComm.spared_tokens == SPARED_TOKENS == 16_384
    plan = PLANS["zigzag"]
    written, _ = arenas(plan, InProcessOneSided, monkeypatch)
    most = max(plan.rank(n).stages[-1].kv.tokens for n in range(plan.group_size))  # type: ignore[union-attr]

    class JustEnough(InProcessOneSided):
        spared_tokens = most

    class TooFew(InProcessOneSided):
        spared_tokens = most + 1

    assert arenas(plan, JustEnough, monkeypatch)[0][1] == written[0]
    assert arenas(plan, TooFew, monkeypatch)[0] == written


def test_from_how_many_bytes_on_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert OneSidedComm.spared_bytes == SPARED_BYTES == 64 * 2**20
    written, _ = arenas(PLANS["zigzag"], InProcessOneSided, monkeypatch)
    theirs = written[1] - written[0]

    class JustEnough(InProcessOneSided):
        spared_bytes = theirs

    class TooFew(InProcessOneSided):
        spared_bytes = theirs + 1

    assert arenas(PLANS["zigzag"], JustEnough, monkeypatch)[0][1] == written[0]
    assert arenas(PLANS["zigzag"], TooFew, monkeypatch)[0] == written


def test_what_arrived_is_not_kept(kinds: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the pass that asked for it, once it is not read any more."""
    plan = PLANS["zigzag"]
    connect(monkeypatch, kinds["messages"])
    alive: list[bool] = []

    def watch(comm: Any) -> None:
        start, kept = comm.start, list[weakref.ref[Any]]()

        def starting(send: Any, receive: Any) -> Any:
            kept.extend(weakref.ref(t) for each in receive.values() for t in each)
            return start(send, receive)

        def ended() -> None:
            alive.extend(tensor() is not None for tensor in kept)

        monkeypatch.setattr(comm, "start", starting)
        monkeypatch.setattr(comm, "end", ended)

    passes(plan, torch.float32, begin=watch)
    assert alive and not any(alive)


def test_without_places_it_sends_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layout ops know no pass."""
    connect(monkeypatch, InProcessOneSided)
    plan = PLANS["zigzag"]

    def body(comm: Comm) -> Tensor:
        exchange = plan.rank(comm.rank).stages[1].kv
        assert exchange is not None
        own = plan.k_layout.shard(torch.arange(64.0).view(1, 64, 1, 1), comm.rank)
        (got,) = comm.fetch(exchange, [own], [ROWS]).wait()
        return got.flatten()

    for rank, got in enumerate(run_ranks(2, body)):
        kv = plan.rank(rank).stages[1].kv
        assert kv is not None and np.array_equal(got.numpy(), kv.indices)


def test_tensors_of_another_device_go_by_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those on a CPU, of a group whose memory is that of GPUs."""
    plan = PLANS["zigzag"]
    want = passes(plan, torch.float32)
    connect(monkeypatch, InProcessOneSided)

    def elsewhere(comm: Any) -> None:
        comm.memory.device = torch.device("meta")
        monkeypatch.setattr(comm.memory, "allocate", None)

    for mine, his in zip(passes(plan, torch.float32, begin=elsewhere), want, strict=True):
        assert mine[1] == his[1] and all(map(torch.equal, mine[0], his[0]))


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", [InProcessOneSided, SparingOneSided])
@pytest.mark.parametrize("channels", [1, 2, 3, 8])
def test_exchanges_without_a_channel_go_by_messages(
    channels: int, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each pass the last ones."""
    plan = PLANS["staged"]
    want = passes(plan, torch.float32, times=2)
    connect(monkeypatch, kind)
    monkeypatch.setattr(one_sided_memory, "CHANNELS", channels)
    written: list[int] = []

    def watch(comm: Any) -> None:
        write = comm._write

        def counted(ready: Any, source: Any) -> None:
            written.extend(ready.channels)
            write(ready, source)

        monkeypatch.setattr(comm, "_write", counted)

    for mine, his in zip(passes(plan, torch.float32, 2, watch), want, strict=True):
        assert mine[1] == his[1] and all(map(torch.equal, mine[0], his[0]))
    assert set(written) == set(range(1, channels))


@pytest.mark.parametrize("where", ["in the kernel", "in the merge"])
def test_a_pass_that_failed_is_not_followed_by_another(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its signals are set, and the next pass would wait on a GPU for ever; or its peers go on to
    another pass than the one that is tried again."""
    connect(monkeypatch, InProcessOneSided)
    plan, failed, reference = PLANS["zigzag"], set[int](), KERNELS["reference"]

    def failing(function: Any) -> Any:
        """Fails once on each rank, a thread."""

        def once(*given: Any) -> Any:
            if threading.get_ident() in failed:
                return function(*given)
            failed.add(threading.get_ident())
            raise MemoryError("no memory")

        return once

    kernel: Any = reference
    if where == "in the kernel":
        kernel = SimpleNamespace(forward=failing(reference.forward))
    else:
        result = failing(forward_pass.Accumulator.result)
        monkeypatch.setattr(forward_pass.Accumulator, "result", result)

    def body(comm: Comm) -> None:
        own = [plan.q_layout.shard(t, comm.rank) for t in draw(plan.mask, torch.float32, 0)[:3]]
        for error, text in (
            (MemoryError, "no memory"),
            (RuntimeError, "ended in an error.*make a new process group"),
        ):
            with pytest.raises(error, match=text):
                attention_forward(plan, comm, kernel, ForwardOperands(*own), Scoring(0.25))

    run_ranks(2, body)
