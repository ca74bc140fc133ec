"""Ranks that are threads of one process: messages in order, and failures that reach all."""

import re
import threading
import time

import pytest
import torch

from customized_ops.ring_attention.core.comm import inprocess
from customized_ops.ring_attention.core.comm.inprocess import PeerFailed, run_ranks, this_thread


def message(value: float) -> torch.Tensor:
    return torch.full((3,), value)


def wait_for_next(comm) -> torch.Tensor:
    """Receive from the next rank, which only some tests' ranks send to."""
    buffer = message(-1.0)
    comm.start({}, {(comm.rank + 1) % comm.size: [buffer]})()
    return buffer


def test_results_are_in_rank_order():
    def slow_first(comm):
        time.sleep(0.02 * (comm.size - comm.rank))
        return comm.rank, comm.size

    assert run_ranks(4, slow_first) == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert run_ranks(1, slow_first) == [(0, 1)]


def test_messages_arrive_in_the_order_sent():
    def around(comm):
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        buffers = [message(-1.0) for _ in range(3)]
        waits = [
            comm.start({after: [message(10.0 * n + comm.rank)]}, {before: [buffer]})
            for n, buffer in enumerate(buffers)
        ]
        for wait in reversed(waits):
            wait()
        return [buffer.tolist() for buffer in buffers]

    for rank, got in enumerate(run_ranks(4, around)):
        assert got == [[10.0 * n + (rank - 1) % 4] * 3 for n in range(3)]


def test_all_gather_object_is_in_rank_order():
    def gather(comm):
        time.sleep(0.01 * (comm.size - comm.rank))
        first = comm.all_gather_object({"rank": comm.rank})
        return first, comm.all_gather_object(comm.rank * 10)

    want = [{"rank": r} for r in range(4)], [0, 10, 20, 30]
    assert run_ranks(4, gather) == [want] * 4


@pytest.mark.parametrize("how", ["sum", "max"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_reduce(ranks, how):
    def reduce(comm):
        time.sleep(0.01 * (comm.size - comm.rank))
        mine = torch.randn(4, 6, generator=torch.Generator().manual_seed(comm.rank))[:, ::2]
        given = mine.clone()
        assert comm.all_reduce(mine, how) is mine  # in place, whatever its strides
        return given, mine, comm.counters.received_bytes

    given, got, received = zip(*run_ranks(ranks, reduce), strict=True)
    stacked = torch.stack(given)
    want = stacked.sum(0) if how == "sum" else stacked.amax(0)
    assert all(torch.equal(result, got[0]) for result in got), "the same bits on every rank"
    torch.testing.assert_close(got[0], want)
    assert received == (2 * 12 * 4 * (ranks - 1) // ranks,) * ranks


@pytest.mark.parametrize("how", ["mean", "SUM", "avg", None])
def test_what_is_no_reduction_is_refused(how):
    with pytest.raises(ValueError, match=re.escape(f"'sum' or 'max', got {how!r}")):
        run_ranks(2, lambda comm: comm.all_reduce(torch.ones(1), how))


def test_a_rank_that_returns_early_is_named_at_once():
    def body(comm):
        if comm.rank != 1:
            wait_for_next(comm)

    began = time.monotonic()
    with pytest.raises(PeerFailed, match="rank 1 has returned without this call"):
        run_ranks(3, body)
    assert time.monotonic() - began < inprocess.TIMEOUT_SECONDS / 2


def test_there_is_a_rank():
    with pytest.raises(ValueError, match="size must be 1 or more, got 0"):
        run_ranks(0, lambda comm: None)


@pytest.mark.parametrize("bad", [0, 2, 3])
def test_a_failing_rank_stops_the_others(bad):
    stopped = []

    def body(comm):
        if comm.rank == bad:
            raise KeyError("the cause")
        try:
            wait_for_next(comm)
        except PeerFailed as error:
            stopped.append(str(error))
            raise

    began = time.monotonic()
    with pytest.raises(KeyError, match="the cause"):
        run_ranks(4, body)
    assert time.monotonic() - began < inprocess.TIMEOUT_SECONDS  # what a wait in vain takes
    assert len(stopped) == 3 and all("cannot go on: a peer failed" in said for said in stopped)


def test_a_failing_rank_stops_a_gather():
    def body(comm):
        if comm.rank == 1:
            raise KeyError("the cause")
        comm.all_gather_object(0)

    with pytest.raises(KeyError, match="the cause"):
        run_ranks(3, body)


def test_threads_end_after_a_failure():
    started = []

    def body(comm):
        started.append(threading.current_thread())
        assert comm.rank != 0, "rank 0 fails"
        wait_for_next(comm)

    with pytest.raises(AssertionError, match="rank 0 fails"):
        run_ranks(6, body)
    assert len(started) == 6 and not any(thread.is_alive() for thread in started)
    assert not inprocess._worlds


def test_a_message_that_nobody_sends(monkeypatch):
    monkeypatch.setattr(inprocess, "TIMEOUT_SECONDS", 0.1)
    with pytest.raises(PeerFailed, match=r"rank 0 of 2 has waited 0.1 s for a rank"):
        run_ranks(2, lambda comm: wait_for_next(comm) if comm.rank == 0 else time.sleep(0.5))


def test_a_message_that_nobody_receives():
    def body(comm):
        if comm.rank == 2:
            comm.start({0: [message(1.0)], 1: [message(2.0)]}, {})()

    with pytest.raises(AssertionError) as info:
        run_ranks(3, body)
    assert str(info.value).startswith("messages from rank 2 to 0, 2 to 1 were never received: ")


def test_a_message_of_the_wrong_length():
    def body(comm):
        comm.start({1 - comm.rank: [torch.zeros(3)]}, {1 - comm.rank: [torch.zeros(4)]})()

    with pytest.raises(RuntimeError, match="size"):
        run_ranks(2, body)


def test_this_thread():
    def body(comm):
        return this_thread(comm.name) is comm

    assert run_ranks(3, body) == [True] * 3
