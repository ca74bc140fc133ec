"""Work on two streams: nothing reads what another stream makes without having waited for it.

A CPU runs one thing after the other, so a wrong order never shows in results: see
:mod:`stream_order`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from stream_order import Event, Noted, Order, Race, Stream, Unheard
from torch import Tensor

from customized_ops.ring_attention.core.kernels import BackwardOperands, ForwardOperands, Scoring
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.core.run import rank_pass as executor
from customized_ops.ring_attention.core.run import side_stream
from customized_ops.ring_attention.core.run.executor import attention_backward, attention_forward
from customized_ops.ring_attention.core.run.forward_pass import ForwardPass
from customized_ops.ring_attention.core.run.rank_heads import RankHeads
from customized_ops.ring_attention.core.run.side_stream import SideStream

HEADS, DIM, V_DIM = (4, 2), 8, 4
GPU = torch.device("cuda", 0)


@pytest.fixture(params=[GPU.index, 1], ids=["current", "another current"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Order]:
    """Stand-ins for torch's streams, which the executor takes CPU tensors to need; on the current
    device, or with another one current."""
    order = Order()

    device = [request.param]

    def set_stream(chosen: Stream) -> None:
        order.now, device[0] = chosen, GPU.index

    @contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        before, order.now = order.now, chosen
        yield
        order.now = before

    def second(device: torch.device, priority: int) -> Stream:
        assert device == GPU and priority < 0, "what waits for peers goes first"
        return order.second

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: order.now)
    monkeypatch.setattr(torch.cuda, "Stream", second)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device[0])
    handle = lambda index: order.now.cuda_stream  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", handle, raising=False)
    monkeypatch.setattr(executor, "SideStream", lambda device, two: SideStream(GPU, two=two))
    side_stream._pair_of.cache_clear()
    yield order
    side_stream._pair_of.cache_clear()
    assert device == [request.param], "another device is current"


CAUSAL = AttnMask.dense(48, causal=True)
BALANCED = {"heads": HEADS, "assignment": "balanced"}
# Rank 0 holds the middle: it has keys for the last rank's rows and rows for the first one's keys.
MIDDLE = Layout.from_ranges([[(16, 32)], [(0, 16)], [(32, 48)]])
PLANS = {
    "zigzag": make_plan(CAUSAL, Layout.zigzag(48, 2), stages=1, heads=HEADS),
    "rows move": make_plan(CAUSAL, Layout.contiguous(48, 2), stages=1, **BALANCED),
    "gathered": make_plan(CAUSAL, Layout.contiguous(48, 4), stages=0, **BALANCED),
    "three steps": make_plan(CAUSAL, Layout.zigzag(48, 4), stages=3, heads=HEADS),
    "scattered": make_plan(CAUSAL, Layout.striped(48, 3, block=4), stages=1, heads=HEADS),
    "teams": make_plan(CAUSAL, Layout.zigzag(48, 4), stages=1, team_size=2, **BALANCED),
    "shared": make_plan(CAUSAL, MIDDLE, stages=1, assignment="shared", heads=HEADS),
    "rows of several ranks": make_plan(
        AttnMask.dense(4, 96), Layout.contiguous(4, 2), Layout.contiguous(96, 2),
        assignment="nearest", heads=HEADS,
    ),
}  # fmt: skip
ALONE = make_plan(AttnMask.varlen([0, 24, 48], causal=True), Layout.contiguous(48, 2))


def passes(plan: Plan, order: Order, times: int = 2, *, with_dlse: bool = False) -> list[Tensor]:
    """Forwards and backwards of rank 0, and what they return is read on the caller's stream."""
    comm, kernel, scoring = Unheard(plan.group_size, order), Noted(order), Scoring(0.3)
    rows, keys = plan.q_layout.sizes[0], plan.k_layout.sizes[0]
    (h, g), read = HEADS, []
    with order:
        for _ in range(times):
            q, k = torch.randn(1, rows, h, DIM), torch.randn(1, keys, g, DIM)
            v, dout = torch.randn(1, keys, g, V_DIM), torch.randn(1, rows, h, V_DIM)
            dlse = torch.randn(1, h, rows) if with_dlse else None
            out, lse = attention_forward(plan, comm, kernel, ForwardOperands(q, k, v), scoring)
            given = BackwardOperands(dout, q, k, v, out, lse, dlse)
            grads = attention_backward(plan, comm, kernel, given, scoring)
            read += [t + 0 for t in (out, lse, *grads)]
            del q, k, v, dout, dlse, out, lse, given, grads
    return read


@pytest.mark.thin(3)
@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_every_use_is_in_order(name: str, with_dlse: bool, order: Order) -> None:
    """Of inputs, of what arrives, of results, and of memory that is used again."""
    passes(PLANS[name], order, with_dlse=with_dlse)
    assert [what for what, _ in order.log if what in ("begin", "end")] == ["begin", "end"] * 4


def assert_laid_out(plan: Plan, order: Order) -> None:
    """Attending own keys with own rows is on the caller's stream; all other calls, and all
    messages, are on the second."""
    kernels = [stream for what, stream in order.log if what == "kernel"]
    half = len(kernels) // 2
    assert kernels[:half] == kernels[half:], "the backward is laid out as the forward"
    assert half == plan.rank(0).calls(HEADS[1])
    assert kernels[:half].count(order.main) == (plan.rank(0).local is not None)
    messages = [stream for what, stream in order.log if what == "message"]
    assert messages == [order.second] * len(messages) != []
    ends = [stream for what, stream in order.log if what == "end"]
    forward = order.main if plan.rows_move else order.second
    assert ends == [forward, order.main], "keys are read long before own rows are done"


@pytest.mark.parametrize("name", PLANS)
def test_what_waits_for_peers_is_on_the_second_stream(name: str, order: Order) -> None:
    passes(PLANS[name], order, times=1)
    assert_laid_out(PLANS[name], order)


@pytest.mark.parametrize("name", ["rows move", "shared"])
def test_when_results_of_guests_go_home(name: str, order: Order) -> None:
    """With "shared" nobody attends rows of others over keys of others, so they need not wait until
    those have been attended."""
    passes(PLANS[name], order, times=1)
    log = [what for what, _ in order.log]
    forward = log[: log.index("end")]
    backward = log[log.index("end") + 1 :]
    after = forward[::-1].index("message")
    assert (after > 0) == (name == "shared") and set(forward[len(forward) - after :]) <= {"kernel"}
    messages = [n for n, what in enumerate(backward) if what == "message"]
    kernels = [n for n, what in enumerate(backward) if what == "kernel"]
    sent_home = [n for n in messages if kernels[0] < n < kernels[-1]]
    assert bool(sent_home) == (name == "shared")


OTHERS_FIRST = [name for name in PLANS if PLANS[name].rank(0).local is not None]


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", OTHERS_FIRST)
def test_own_keys_last(name: str, order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another order for the host, but neither a race nor another result."""
    results = []
    for last in (True, False):
        monkeypatch.setattr(executor.RankPass, "own_last", lambda *given, last=last: last)
        torch.manual_seed(0)
        order.log.clear()
        results.append(passes(PLANS[name], order))
        kernels = [stream for what, stream in order.log if what == "kernel"]
        backward = kernels[len(kernels) // 4 : len(kernels) // 2]
        assert backward.index(order.main) == (len(backward) - 1) * last
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_when_own_keys_come_last(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many bytes of k and v as of q, and many; never on one stream or in one queue."""
    monkeypatch.setattr(executor.RankPass, "__abstractmethods__", frozenset())

    def last(heads: tuple[int, int], rows: int, two: bool = True) -> bool:
        h, g = heads
        q, k = torch.empty(1, rows, h, 8), torch.empty(1, rows, g, 8)
        plan, comm = PLANS["zigzag"], Unheard(2, order)
        comm.two_streams = two
        share = RankHeads(plan, 0, q, k, Scoring(0.3), None)
        run = executor.RankPass(executor.RankCall(plan, comm, Noted(order), share))
        return run.own_last(q, k, k)

    most = executor.LARGE_BYTES // (2 * 2 * 8 * 4)  # rows of 2 key heads, fp32
    assert last((4, 2), most) and last((2, 2), most)
    assert not last((4, 2), most - 1) and not last((6, 2), most)
    assert not last((4, 2), most, two=False)
    monkeypatch.setattr(side_stream, "ONE_QUEUE", True)
    assert not last((4, 2), most)


def test_a_rank_that_needs_nobody_uses_one_stream(order: Order) -> None:
    passes(ALONE, order)
    assert not order.second.seen
    assert order.log == [("kernel", order.main)] * 4


# ------------------------------------------------------------------- the tests above can fail


@pytest.mark.parametrize("step", ["fork", "join"])
@pytest.mark.parametrize("name", ["zigzag", "rows move"])
def test_a_missing_step_is_noticed(
    name: str, step: str, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SideStream, step, lambda self: None)
    with pytest.raises(Race):
        passes(PLANS[name], order)


def test_one_stream_is_noticed(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SideStream, "second", lambda self: side_stream.NOTHING)
    passes(PLANS["zigzag"], order, times=1)
    with pytest.raises(AssertionError):
        assert_laid_out(PLANS["zigzag"], order)


def test_an_end_on_the_other_stream_is_noticed(
    order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(self: Any) -> None:
        with torch.cuda.stream(order.main):  # type: ignore[arg-type]
            self._comm.end()

    monkeypatch.setattr(executor.RankPass, "end", end)
    with pytest.raises(Race, match="the end, while what peers sent may be in use"):
        passes(PLANS["zigzag"], order)


def test_an_early_end_is_noticed(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the keys have arrived, before they are attended."""
    attend = ForwardPass.attend

    def ended(self: Any, stage: int, *given: Any, **rest: Any) -> Any:
        if stage:
            self.end()
            monkeypatch.setattr(executor.RankPass, "end", lambda self: None)
        return attend(self, stage, *given, **rest)

    monkeypatch.setattr(ForwardPass, "attend", ended)
    with pytest.raises(Race, match="uses what peers sent, after the end"):
        passes(PLANS["zigzag"], order)


def test_memory_given_away_early_is_noticed(order: Order) -> None:
    with order:
        one = torch.ones(4)
        order.second.seen |= order.main.seen
        with torch.cuda.stream(order.second):  # type: ignore[arg-type]
            kept = one + 1
        del one
        with pytest.raises(Race, match="memory is given away"):
            torch.ones(4)
    assert kept.sum() == 8


# ----------------------------------------------------------------------------- without streams


def test_on_a_cpu_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("current_stream", "Stream", "stream", "set_stream", "current_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, **kwargs: pytest.fail("a stream"))
    for device, two in ((torch.device("cpu"), True), (torch.device("cpu"), False), (GPU, False)):
        streams = SideStream(device, two=two)
        streams.fork()
        with streams.second() as inside:
            assert inside is None
        streams.join()
