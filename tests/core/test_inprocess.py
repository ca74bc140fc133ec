import threading
import time

import numpy as np
import pytest
import torch

from customized_ops.ring_attention.core import inprocess
from customized_ops.ring_attention.core.inprocess import PeerFailed, run_ranks, this_thread
from customized_ops.ring_attention.core.rank_plan import Exchange

SECONDS = 10.0  # far less than a hang, far more than any of these takes


def message(value: float) -> torch.Tensor:
    return torch.full((3,), value)


def wait_for_next(comm) -> torch.Tensor:
    """Receive from the next rank, which only some tests' ranks send to."""
    buffer = message(-1.0)
    comm.start({}, {(comm.rank + 1) % comm.size: buffer})()
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
            comm.start({after: message(10.0 * n + comm.rank)}, {before: buffer})
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
    assert time.monotonic() - began < SECONDS
    assert stopped == ["a peer failed"] * 3


def test_a_failing_rank_stops_a_gather():
    def body(comm):
        if comm.rank == 1:
            raise KeyError("the cause")
        comm.all_gather_object(0)

    with pytest.raises(KeyError, match="the cause"):
        run_ranks(3, body)


def test_threads_end_after_a_failure():
    def body(comm):
        assert comm.rank != 0, "rank 0 fails"
        wait_for_next(comm)

    before = threading.active_count()
    with pytest.raises(AssertionError, match="rank 0 fails"):
        run_ranks(6, body)
    assert threading.active_count() == before
    assert not inprocess._worlds


def test_a_message_that_nobody_sends(monkeypatch):
    monkeypatch.setattr(inprocess, "TIMEOUT_SECONDS", 0.1)
    with pytest.raises(PeerFailed, match=r"^a message never came$"):
        run_ranks(2, lambda comm: wait_for_next(comm) if comm.rank == 0 else None)


def test_a_message_that_nobody_receives():
    def body(comm):
        if comm.rank == 2:
            comm.start({0: message(1.0), 1: message(2.0)}, {})()

    with pytest.raises(AssertionError) as info:
        run_ranks(3, body)
    want = "messages that nobody received: [(2, 0, 0), (2, 1, 0)]"
    assert str(info.value).splitlines()[0] == want


def test_a_message_of_the_wrong_length():
    def body(comm):
        comm.start({1 - comm.rank: torch.zeros(3)}, {1 - comm.rank: torch.zeros(4)})()

    with pytest.raises(RuntimeError, match="size"):
        run_ranks(2, body)


def test_this_thread():
    def body(comm):
        return this_thread(comm.name) is comm

    assert run_ranks(3, body) == [True] * 3


def table(rows) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


# Rank 0 holds tokens 0 1 2 and gets 4 and a copy of its own 1; rank 1 holds 3 4 and gets 0 2.
EXCHANGES = [
    Exchange(table([(0, 1, 1), (1, 0, 1), (1, 2, 1)]), table([(0, 0, 1), (1, 1, 1)]), 2),
    Exchange(table([(0, 1, 1)]), table([(0, 0, 1), (0, 1, 1)]), 2),
]
HELD = [[0.0, 1.0, 2.0], [3.0, 4.0]]


def own_tokens(rank: int) -> torch.Tensor:
    """[2, tokens]: a batch of two, the second negative."""
    return torch.tensor([HELD[rank], [-value for value in HELD[rank]]])


def test_fetch():
    def body(comm):
        lse = own_tokens(comm.rank)
        tokens_first = lse.T.unsqueeze(-1)
        first, second = comm.fetch(EXCHANGES[comm.rank], [tokens_first, lse], [0, 1]).wait()
        assert torch.equal(first.squeeze(-1).T, second)
        return second.tolist(), comm.counters.sent_bytes, comm.counters.received_bytes

    token = 2 * 2 * 4  # two tensors, a batch of two, fp32; the copy of rank 0's own is not counted
    assert run_ranks(2, body) == [
        ([[1.0, 4.0], [-1.0, -4.0]], 2 * token, token),
        ([[0.0, 2.0], [0.0, -2.0]], token, 2 * token),
    ]


@pytest.mark.parametrize(
    ("method", "want"),
    [
        ("give", [[10.0, 1.0, 20.0], [3.0, 2.0]]),
        ("reduce", [[0.0 + 10.0, 1.0 + 1.0, 2.0 + 20.0], [3.0, 4.0 + 2.0]]),
    ],
)
def test_results_go_home(method, want):
    results = [torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0, 20.0]])]

    def body(comm):
        home = own_tokens(comm.rank)[:1].clone()
        send = getattr(comm, method)
        send(EXCHANGES[comm.rank], [results[comm.rank]], [home], [1]).wait()
        return home[0].tolist()

    assert run_ranks(2, body) == want
