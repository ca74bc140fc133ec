"""What is recorded, what is not, and what ends a pass from its tape."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from one_sided_memory import InProcessOneSided
from replay_cases import CAUSAL, HEADS, PLANS, SEEN, TIMES, assert_alike, calls, draw, kernel
from torch import Tensor

from customized_ops.ring_attention import wrap_ring_attn_func
from customized_ops.ring_attention.core import tape
from customized_ops.ring_attention.core.comm import Comm, inprocess
from customized_ops.ring_attention.core.comm.inprocess import run_ranks
from customized_ops.ring_attention.core.comm.patience import PeerFailed
from customized_ops.ring_attention.core.kernels import KERNELS, ForwardOperands, Scoring
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.plan import make_plan
from customized_ops.ring_attention.core.run.executor import attention_forward
from customized_ops.ring_attention.core.run.replays import graphs, replay, seen_before
from customized_ops.ring_attention.core.run.side_stream import keeping_stream


def test_graphs_are_not_thought_of_in_the_first_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is done for them that a plan of a few passes would pay for."""
    cut, apart = list[int](), tape.Tape.apart
    monkeypatch.setattr(tape.Tape, "apart", lambda made: cut.append(1) or apart(made))
    x = torch.ones(2)
    _, made = tape.record(lambda: (tape.copied(Tensor.clone, x),), (x,))
    assert made is not None
    with_graphs = graphs.Graphs(made, lambda *_: None, early=3)
    found = []
    for _ in range(6):
        assert torch.equal(with_graphs.run([x])[0], x)
        found.append(len(cut))
    assert found == [0, 0, 1, 1, 1, 1]


def test_of_passes_that_had_not_come_before_graphs_are_made_later(
    from_the_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    of_tape = lambda tape, given, is_new: asked.append(is_new) or tape  # noqa: E731
    monkeypatch.setattr(replay, "of_tape", of_tape)
    monkeypatch.setattr(inprocess, "InProcessComm", InProcessOneSided)
    calls(PLANS["zigzag"], kernel())
    assert asked and set(asked) == {from_the_first}


def test_a_call_is_recorded_later_where_it_could_not_be(replays: list[int]) -> None:
    """Something kept the first recording; the next try is after ten times as many calls."""
    plan, tries = make_plan(CAUSAL, Layout.zigzag(64, 2), stages=1, heads=HEADS), []

    def forward(given: Any, *rest: Any, **options: Any) -> Any:
        if tape.recording():
            tries.append(1)
            if len(tries) <= 2 * plan.group_size:
                tape.refuse()
        return kernel().forward(given, *rest, **options)

    attends = kernel()
    attends.forward = forward
    assert_alike(calls(plan, attends, 12 * SEEN), calls(plan, kernel(recorded=False), 12 * SEEN))
    assert len(tries) > 2 * plan.group_size


def test_none_is_recorded_where_that_is_not_safe(
    replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = PLANS["zigzag"]

    def refusing(given: Any, *rest: Any, **options: Any) -> Any:
        tape.refuse()
        return kernel().forward(given, *rest, **options)

    def unseen(given: Any, *rest: Any, **options: Any) -> Any:
        out, lse = kernel().forward(given, *rest, **options)
        with tape.aside():
            return out.clone(), lse

    for forward in (refusing, unseen):
        attends = kernel()
        attends.forward = forward
        want = kernel(recorded=False)
        want.forward = forward
        assert_alike(calls(plan, attends), calls(plan, want))
        assert len(replays) <= plan.group_size * TIMES, "the backward's alone"
        replays.clear()
    monkeypatch.setattr(replay, "LARGE_BYTES", 1)
    calls(plan, kernel())
    monkeypatch.setattr(replay, "LARGE_BYTES", 1 << 30)
    with replay.replay(False):
        calls(plan, kernel())
    assert not replays
    calls(plan, kernel())
    assert replays


def test_a_failed_pass_is_told_to_those_that_follow(replays: list[int]) -> None:
    """A pass from a tape that fails leaves its rank as a pass does."""
    plan = PLANS["zigzag"]

    def body(comm: Comm) -> str:
        q, k, v, _ = (plan.q_layout.shard(t, comm.rank) for t in draw(CAUSAL, 0))
        attends, scoring = kernel(), Scoring(0.25)
        for _ in range(TIMES + 2):
            attention_forward(plan, comm, attends, ForwardOperands(q, k, v), scoring)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tape.Tape, "run", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                attention_forward(plan, comm, attends, ForwardOperands(q, k, v), scoring)
            patch.setattr(comm, "tell_failure", lambda _: 1 / 0)  # peers know the first error
            with pytest.raises(RuntimeError, match="ended in an error"), comm.doing("a call"):
                attention_forward(plan, comm, attends, ForwardOperands(q, k, v), scoring)
        with pytest.raises(RuntimeError, match="ended in an error") as caught:
            attention_forward(plan, comm, attends, ForwardOperands(q, k, v), scoring)
        return str(caught.value)

    assert len(run_ranks(2, body)) == 2 and replays


@pytest.mark.parametrize("before", [0, TIMES + 2])
def test_what_a_device_found_is_raised_by_the_next_pass(before: int, replays: list[int]) -> None:
    """Whether it is a tape or not, and before anything else is asked of the device."""
    plan = make_plan(CAUSAL, Layout.zigzag(64, 2), stages=1, heads=HEADS)

    def body(comm: Any) -> None:
        q, k, v, _ = (plan.q_layout.shard(t, comm.rank) for t in draw(CAUSAL, 0))
        attends, given = kernel(), ForwardOperands(q, k, v)
        for _ in range(before):
            attention_forward(plan, comm, attends, given, Scoring(0.25))
        comm.memory.problem = "rank 1 is elsewhere"
        comm.memory.capturing = lambda: 1 / 0
        with pytest.raises(PeerFailed, match="rank 1 is elsewhere"), comm.doing("a call"):
            attention_forward(plan, comm, attends, given, Scoring(0.25))

    run_ranks(2, body)
    assert bool(replays) == bool(before)


@pytest.mark.usefixtures("replays")
@pytest.mark.parametrize(
    "error, raised",
    [(ValueError("a stopped device"), PeerFailed), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_what_a_device_found_says_why_a_pass_failed(
    error: BaseException, raised: type[BaseException]
) -> None:
    """A library that meets a stopped device has an error of its own for it."""

    def body(comm: Any) -> None:
        with pytest.raises(raised) as caught, comm.doing("a call"):
            comm.memory.problem = "rank 1 is elsewhere"
            raise error
        assert error in (caught.value, caught.value.__context__)

    run_ranks(2, body)


def test_a_failed_tape_leaves_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[Any] = [{"stream_id": 7, "device_index": 0, "device_type": 1}]
    here = list(current)
    now = lambda n: tuple(current[0].values())  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", now, raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda **stream: stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream))

    def failing() -> None:
        torch.cuda.set_stream(torch.cuda.Stream(stream_id=8, device_index=0, device_type=1))
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        keeping_stream(torch.device("cuda", 0), failing)
    assert current == here


def test_tapes_go_with_their_group(replays: list[int]) -> None:
    plan = make_plan(CAUSAL, Layout.zigzag(64, 2), stages=1, heads=HEADS)
    known = list(replay._of_comms)
    kept: list[weakref.ref[Any]] = []

    def body(comm: Comm) -> None:
        kept.append(weakref.ref(comm))
        q, k, v, _ = (plan.q_layout.shard(t, comm.rank) for t in draw(CAUSAL, 0))
        attends, scoring = kernel(), Scoring(0.25)
        for _ in range(TIMES + 2):
            attention_forward(plan, comm, attends, ForwardOperands(q, k, v), scoring)
        tapes = [
            seen.tape
            for seen in replay._of_comms[comm].plans.known[plan].seen.values()
            if seen.tape
        ]
        kept.extend(weakref.ref(made._function) for made in tapes)

    gc.disable()
    try:
        run_ranks(2, body)
        gone = [ref() is None for ref in kept]
    finally:
        gc.enable()
    assert replays and len(gone) == 4 and all(gone), "without a collection of garbage"
    assert not [comm for comm in replay._of_comms if comm not in known]


def test_a_compiled_function_replays_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a graph's op attends; with the same results, bit for bit."""
    replays: list[int] = []
    whole = tape.Tape.run
    monkeypatch.setattr(tape.Tape, "run", lambda *given: replays.append(1) or whole(*given))
    monkeypatch.setattr(seen_before, "SEEN_BEFORE", SEEN)
    monkeypatch.setattr(replay, "_of_pairs", seen_before.SeenBefore())
    monkeypatch.setattr(replay, "_of_plans", seen_before.SeenBefore())
    for name, what in vars(kernel()).items():
        monkeypatch.setattr(KERNELS["reference"], name, what, raising=False)
    monkeypatch.setattr(replay, "_checked", {})

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return wrap_ring_attn_func(q, k, v, causal=True, kernel="reference")

    def results(function: Any) -> list[Tensor]:
        found = []
        for n in range(TIMES):
            *given, dout = draw(CAUSAL, n)
            leaves = [t.requires_grad_() for t in given]
            out = function(*leaves)
            found += [out.detach(), *torch.autograd.grad(out, leaves, dout)]
        return found

    with replay.replay(False):
        want = results(attend)
    assert not replays
    got = results(torch.compile(attend, backend="aot_eager", fullgraph=True))
    assert len(replays) >= TIMES
    assert all(map(torch.equal, got, want))


def test_another_value_of_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(replay.CHOICE, "off")
    with pytest.raises(ValueError, match="SEQSHARD_REPLAY must be 0, 1 or tapes, got 'off'"):
        replay._chosen()


@pytest.mark.slow
def test_the_environment_variable() -> None:
    """Imported anew for each value, in a process of its own."""
    said = """
import importlib, os
from customized_ops.ring_attention.core.run.replays import replay
for value in ("0", "tapes", "1", None):
    os.environ.pop(replay.CHOICE, None)
    os.environ.update({} if value is None else {replay.CHOICE: value})
    print(value, importlib.reload(replay)._enabled)
"""
    ran = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert ran.stdout.split("\n")[:4] == ["0 False", "tapes True", "1 True", "None True"]
