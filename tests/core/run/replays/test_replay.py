"""A pass from its tape does what the pass did, to other tensors."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_cases import drawn
from replay_cases import CAUSAL, DIM, HEADS, PLANS, SEEN, TIMES, assert_alike, calls, draw, kernel
from torch import Tensor

from customized_ops.ring_attention.core import tape
from customized_ops.ring_attention.core.comm import Comm, inprocess
from customized_ops.ring_attention.core.comm.inprocess import run_ranks
from customized_ops.ring_attention.core.kernels import ForwardOperands, Scoring
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import make_plan
from customized_ops.ring_attention.core.run.executor import attention_forward
from customized_ops.ring_attention.core.run.replays import call_key, replay

MESSAGES = inprocess.InProcessComm


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
@pytest.mark.usefixtures("from_the_first")
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
    assert not [comm for comm in replay._of_comms if plan in replay._of_comms[comm].plans.known]


def test_each_device_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default streams of two GPUs have one handle."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    gpus = [SimpleNamespace(device=torch.device("cuda", n)) for n in range(2)]
    first, second = (call_key._where([gpu]) for gpu in gpus)  # type: ignore[list-item]
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
