"""A pass from its tape does what the pass did, to other tensors."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_cases import drawn
from one_sided_memory import InProcessOneSided
from replay_cases import CAUSAL, DIM, HEADS, PLANS, draw, kernel
from torch import Tensor

from customized_ops.ring_attention import wrap_ring_attn_func
from customized_ops.ring_attention.core import tape
from customized_ops.ring_attention.core.comm import Comm, inprocess
from customized_ops.ring_attention.core.comm.inprocess import run_ranks
from customized_ops.ring_attention.core.comm.patience import PeerFailed
from customized_ops.ring_attention.core.kernels import (
    KERNELS,
    BackwardOperands,
    ForwardOperands,
    Scoring,
)
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.core.run import replay, seen_before
from customized_ops.ring_attention.core.run.executor import attention_backward, attention_forward
from customized_ops.ring_attention.core.run.side_stream import keeping_stream

SEEN, TIMES = 2, 6  # calls before one is recorded, and of a test
MESSAGES = inprocess.InProcessComm


def calls(
    plan: Plan,
    attends: Any,
    times: int = TIMES,
    own: Callable[[Tensor, int], Tensor] = lambda t, n: t,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> list[tuple[list[Tensor], tuple[int, int, int]]]:
    """Each rank's (out, lse, dq, dk, dv) of each of so many calls with data of their own, and what
    its Comm counted; ``own`` makes a rank's tensors of call n what it is given."""

    def body(comm: Comm) -> tuple[list[Tensor], tuple[int, int, int]]:
        results: list[Tensor] = []
        for n in range(times):
            q, k, v, dout = draw(plan.mask, n, dtype)
            mine = [plan.q_layout.shard(q, comm.rank), plan.q_layout.shard(dout, comm.rank)]
            mine += [plan.k_layout.shard(t, comm.rank) for t in (k, v)]
            q, dout, k, v = (own(t, n) for t in mine)
            scoring = Scoring(0.25)
            out, lse = attention_forward(plan, comm, attends, ForwardOperands(q, k, v), scoring)
            given = BackwardOperands(dout, q, k, v, out, lse)
            grads = attention_backward(plan, comm, attends, given, scoring, **options)
            results += [out, lse, *grads]
        counted = comm.counters
        return results, (counted.sent_bytes, counted.received_bytes, comm.arena_bytes)

    return run_ranks(plan.group_size, body)


def assert_alike(one: Any, other: Any) -> None:
    """Every result and every count is the same, to the bit."""
    for rank, ((a, counted_a), (b, counted_b)) in enumerate(zip(one, other, strict=True)):
        assert counted_a == counted_b, f"rank {rank} counts other bytes"
        for n, (x, y) in enumerate(zip(a, b, strict=True)):
            assert torch.equal(x, y), f"rank {rank}, result {n % 5} of call {n // 5}"


@pytest.fixture(autouse=True)
def sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are recorded after fewer calls."""
    monkeypatch.setattr(seen_before, "SEEN_BEFORE", SEEN)
    monkeypatch.setattr(replay, "_of_pairs", seen_before.SeenBefore())
    monkeypatch.setattr(replay, "_of_plans", seen_before.SeenBefore())


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks of passes that came from tapes."""
    seen: list[int] = []
    whole = InProcessOneSided.replay

    def replay(self: InProcessOneSided, moved: Any, run: Any) -> Any:
        seen.append(self.rank)
        return whole(self, moved, run)

    monkeypatch.setattr(InProcessOneSided, "replay", replay)
    monkeypatch.setattr(inprocess, "InProcessComm", InProcessOneSided)
    return seen


SLOW = pytest.mark.slow


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", PLANS)
def test_tapes_do_what_passes_do(name: str, replays: list[int]) -> None:
    plan = PLANS[name]
    want = calls(plan, kernel(recorded=False))
    assert not replays
    assert_alike(calls(plan, kernel()), want)
    # The first call makes memory, the second makes it one piece.
    for rank in range(plan.group_size):
        assert replays.count(rank) >= 2 * (TIMES - SEEN - 3)


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(n, marks=SLOW) for n in range(2, 60))])
def test_drawn_plans(seed: int, replays: list[int]) -> None:
    source = random.Random(seed)
    mask, layout = drawn(source, source.randrange(2, 6))
    plan = make_plan(
        mask,
        layout,
        heads=HEADS,
        stages=source.choice([None, 0, 1, 2]),
        assignment=source.choice(["owner", "balanced", "shared", "auto"]),
        team_size=2 if layout.group_size % 2 == 0 and source.random() < 0.3 else 1,
    )
    assert_alike(calls(plan, kernel()), calls(plan, kernel(recorded=False)))
    assert replays or not plan.keys_move


def test_other_tensors_have_other_tapes(replays: list[int]) -> None:
    """Of other strides, of memory that starts elsewhere, of two that share theirs."""
    plan = PLANS["zigzag"]

    def own(t: Tensor, n: int) -> Tensor:
        kind = n % 3
        if kind == 0:
            return t.contiguous()
        wide = t.new_zeros(t.shape[0], t.shape[1] + 1, t.shape[2], 2 * t.shape[3])
        wide[:, kind - 1 : t.shape[1] + kind - 1, :, : t.shape[3]] = t
        return wide[:, kind - 1 : t.shape[1] + kind - 1, :, : t.shape[3]]

    times = 3 * TIMES
    want = calls(plan, kernel(recorded=False), times, own)
    assert_alike(calls(plan, kernel(), times, own), want)
    assert replays


def test_inputs_may_share_memory(replays: list[int]) -> None:
    """q and its gradient lie in one tensor in half of the calls that a tape serves."""
    plan, shared = PLANS["zigzag"], {}

    def own(t: Tensor, n: int) -> Tensor:
        if n % 2:
            return t.contiguous()
        pair = torch.stack([t, t])
        shared[n] = pair
        return pair[1]

    assert_alike(calls(plan, kernel(), TIMES, own), calls(plan, kernel(recorded=False), TIMES, own))
    assert replays and shared


def test_one_tensor_may_be_given_twice(replays: list[int]) -> None:
    """k and v are one tensor in some calls, and two in others that are alike."""
    plan = make_plan(CAUSAL, Layout.zigzag(64, 2), stages=1, heads=HEADS)

    def body(comm: Comm) -> list[Tensor]:
        results: list[Tensor] = []
        for n in range(4 * SEEN):
            q, k, v, _ = (plan.q_layout.shard(t, comm.rank) for t in draw(CAUSAL, n, v_dim=DIM))
            given = ForwardOperands(q, k, k if n < 2 * SEEN else v)
            results += attention_forward(plan, comm, attends, given, Scoring(0.25))
        return results

    attends = kernel()
    got = run_ranks(2, body)
    attends = kernel(recorded=False)
    for one, other in zip(got, run_ranks(2, body), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_options_have_their_own_tapes(replays: list[int]) -> None:
    plan = PLANS["staged"]
    for options in ({}, {"reduce_dtype": torch.bfloat16}):
        given = {"dtype": torch.float32, **options}
        assert_alike(calls(plan, kernel(), **given), calls(plan, kernel(recorded=False), **given))
    assert replays


def test_one_device_has_tapes_too(replays: list[int]) -> None:
    """A call without peers, and those of ranks that send messages."""
    seen = []
    whole = tape.Tape.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tape.Tape, "run", lambda self, given: seen.append(1) or whole(self, given))
        alone = make_plan(CAUSAL, Layout.contiguous(64, 1), heads=HEADS)
        assert_alike(calls(alone, kernel()), calls(alone, kernel(recorded=False)))
        assert len(seen) == 2 * (TIMES - SEEN - 1)
        patch.setattr(inprocess, "InProcessComm", MESSAGES)
        plan = PLANS["zigzag"]
        assert_alike(calls(plan, kernel()), calls(plan, kernel(recorded=False)))
        assert len(seen) > 2 * plan.group_size and not replays


def test_where_nothing_moves_peers_are_not_told(
    replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ranks that attend their own keys alone, some rows attend nothing: their passes are tapes,
    and leave the group as it was."""
    played = []
    whole = tape.Tape.run
    monkeypatch.setattr(tape.Tape, "run", lambda self, t: played.append(1) or whole(self, t))
    mask = AttnMask.from_slices([(16, 32, 0, 32, -64, 0), (32, 48, 32, 64, -64, 64)], 64, 64)
    plan = make_plan(mask, Layout.contiguous(64, 2), heads=HEADS, assignment="owner")
    assert not (plan.rows_move or plan.keys_move)
    assert_alike(calls(plan, kernel()), calls(plan, kernel(recorded=False)))
    assert played and not replays
    assert not [comm for comm in replay._of_comms if plan in replay._of_comms[comm][1].known]


def test_each_device_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default streams of two GPUs have one handle."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    gpus = [SimpleNamespace(device=torch.device("cuda", n)) for n in range(2)]
    first, second = (replay._where([gpu]) for gpu in gpus)  # type: ignore[list-item]
    assert first != second


def test_autocast_has_tapes_of_its_own(replays: list[int]) -> None:
    """Under it the same call reaches the device as others."""
    plan = PLANS["zigzag"]

    def own(t: Tensor, n: int) -> Tensor:
        torch.set_autocast_enabled("cpu", n % 2 == 0)  # of this rank's thread
        return t

    given: dict[str, Any] = {"own": own, "dtype": torch.float32}
    want = calls(plan, kernel(recorded=False), 2 * TIMES, **given)
    assert_alike(calls(plan, kernel(), 2 * TIMES, **given), want)
    assert replays
    (one, _), *_ = want
    assert not torch.equal(one[0], calls(plan, kernel(), 1, dtype=torch.float32)[0][0][0])


def test_memory_made_in_inference_mode_trains(replays: list[int]) -> None:
    plan = make_plan(CAUSAL, Layout.zigzag(64, 2), stages=1, heads=HEADS)

    def body(comm: Comm) -> Tensor:
        q, k, v, _ = (plan.q_layout.shard(t, comm.rank) for t in draw(CAUSAL, 0))
        for inference in (True, False):
            with torch.inference_mode(inference):
                for _ in range(TIMES):
                    out, _ = attention_forward(
                        plan, comm, kernel(), ForwardOperands(q, k, v), Scoring(0.25)
                    )
        return out

    assert all(out.isfinite().all() for out in run_ranks(2, body)) and replays


def test_a_call_is_recorded_later_where_it_could_not_be(replays: list[int]) -> None:
    """Something kept the first recording; the next try is after ten times as many calls."""
    plan, tries = make_plan(CAUSAL, Layout.zigzag(64, 2), stages=1, heads=HEADS), []

    def forward(given: Any, *rest: Any, **options: Any) -> Any:
        if tape.recording():
            tries.append(1)
            if len(tries) <= 2 * plan.group_size:
                tape.refuse()
        return KERNELS["reference"].forward(given, *rest, **options)

    attends = kernel()
    attends.forward = forward
    assert_alike(calls(plan, attends, 12 * SEEN), calls(plan, kernel(recorded=False), 12 * SEEN))
    assert len(tries) > 2 * plan.group_size


def test_none_is_recorded_where_that_is_not_safe(
    replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = PLANS["zigzag"]

    def reading(given: Any, *rest: Any, **options: Any) -> Any:
        given[0].sum().item()
        return KERNELS["reference"].forward(given, *rest, **options)

    def unseen(given: Any, *rest: Any, **options: Any) -> Any:
        out, lse = KERNELS["reference"].forward(given, *rest, **options)
        return torch.from_numpy(out.numpy()), lse  # memory that torch is not seen to make

    for forward in (reading, unseen):
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
            seen.tape for seen in replay._of_comms[comm][1].known[plan].seen.values() if seen.tape
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
    monkeypatch.setattr(KERNELS["reference"], "watched", nullcontext, raising=False)
    monkeypatch.setattr(KERNELS["reference"], "unproven_tapes", lambda: None, raising=False)
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


@pytest.mark.parametrize(("given", "enabled"), [("0", "False"), ("1", "True"), (None, "True")])
def test_the_environment_variable(given: str | None, enabled: str) -> None:
    others = {name: value for name, value in os.environ.items() if name != replay.CHOICE}
    said = "from customized_ops.ring_attention.core.run import replay; print(replay._enabled)"
    environment = others if given is None else others | {replay.CHOICE: given}
    ran = subprocess.run(
        [sys.executable, "-c", said], env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == enabled
