"""Passes over messages come from tapes too, in which these are sent anew."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
from host_cases import drawn
from replay_cases import CAUSAL, HEADS, PLANS, SEEN, TIMES, assert_alike, calls, kernel

from customized_ops.ring_attention.core import tape
from customized_ops.ring_attention.core.comm import Comm, inprocess
from customized_ops.ring_attention.core.comm.patience import PeerFailed
from customized_ops.ring_attention.core.cost import CostModel
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.plan import make_plan
from customized_ops.ring_attention.core.run.replays import replay
from customized_ops.ring_attention.core.topology import Topology

SLOW = pytest.mark.slow
HOSTS = CostModel(topology=Topology((2, 2)), held_shards=1)
HERE: dict[str, Any] = {"heads": HEADS, "costs": HOSTS}


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks of passes that came from tapes."""
    seen: list[int] = []
    whole = Comm.replay

    def replayed(self: Comm, moved: Any, run: Any) -> Any:
        seen.append(self.rank)
        return whole(self, moved, run)

    monkeypatch.setattr(Comm, "replay", replayed)
    return seen


@pytest.mark.parametrize("name", PLANS)
def test_tapes_do_what_passes_do(name: str, from_the_first: bool, replays: list[int]) -> None:
    plan = PLANS[name]
    want = calls(plan, kernel(recorded=False))
    assert not replays
    assert_alike(calls(plan, kernel()), want)
    for rank in range(plan.group_size):
        assert replays.count(rank) == 2 * (TIMES - 1 - (0 if from_the_first else SEEN))


@pytest.mark.parametrize("layout", [Layout.zigzag(64, 4), Layout.striped(64, 4, block=2)])
def test_relays_are_replayed(layout: Layout, replays: list[int]) -> None:
    """Over two hosts, a token crosses once and goes on inside."""
    plan = make_plan(CAUSAL, layout, **HERE)
    assert plan.relays
    assert_alike(calls(plan, kernel()), calls(plan, kernel(recorded=False)))
    for rank in range(plan.group_size):
        assert replays.count(rank) == 2 * (TIMES - SEEN - 1)


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(n, marks=SLOW) for n in range(2, 60))])
@pytest.mark.usefixtures("from_the_first")
def test_drawn_plans(seed: int, replays: list[int]) -> None:
    source = random.Random(seed)
    mask, layout = drawn(source, source.choice([2, 3, 4, 4]))
    given: dict[str, Any] = {"heads": HEADS}
    if layout.group_size == 4 and source.random() < 0.5:
        given["costs"] = HOSTS
    plan = make_plan(
        mask,
        layout,
        stages=source.choice([None, 0, 1, 2]),
        assignment=source.choice(["owner", "balanced", "shared", "auto"]),
        **given,
    )
    assert_alike(calls(plan, kernel()), calls(plan, kernel(recorded=False)))
    assert replays or not (plan.keys_move or plan.rows_move)


def test_memory_of_messages_lives_until_they_have_arrived(replays: list[int]) -> None:
    """In a tape, too: a step that begins messages frees none of what they carry."""
    seen: list[tape.Tape] = []
    with pytest.MonkeyPatch.context() as patch:
        whole = replay.record

        def record(run: Any, given: Any) -> Any:
            results, made = whole(run, given)
            seen.append(made)
            return results, made

        patch.setattr(replay, "record", record)
        calls(PLANS["staged"], kernel())
    begins = ends = 0
    for made in filter(None, seen):
        for step in made.steps:
            name = getattr(step.function, "__name__", "")
            begins, ends = begins + (name == "_begin"), ends + (name == "_end")
            assert name != "_begin" or not step.frees
    assert begins == ends > 0 and replays


def test_tapes_do_not_keep_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: set[weakref.ref[Comm]] = set()
    whole = Comm.replay

    def replayed(self: Comm, moved: Any, run: Any) -> Any:
        groups.add(weakref.ref(self))
        return whole(self, moved, run)

    monkeypatch.setattr(Comm, "replay", replayed)
    calls(PLANS["zigzag"], kernel())
    gc.collect()
    assert [group() for group in groups] == [None, None]


def test_an_error_in_a_replayed_pass_is_told(replays: list[int]) -> None:
    """Of one rank, whose peer waits for it in a pass from a tape too; none keeps messages."""
    stopped: list[BaseException] = []
    groups: set[Comm] = set()
    whole_replay = Comm.replay

    def replayed(self: Comm, moved: Any, run: Any) -> Any:
        groups.add(self)
        try:
            return whole_replay(self, moved, run)
        except PeerFailed as error:
            stopped.append(error)
            raise

    def fail() -> None:
        raise RuntimeError("a link is down")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Comm, "replay", replayed)
        whole = inprocess.InProcessComm.start

        def start(self: Any, send: Any, receive: Any) -> Any:
            wait = whole(self, send, receive)
            return fail if self.rank == 1 and len(replays) >= 8 else wait

        patch.setattr(inprocess.InProcessComm, "start", start)
        with pytest.raises(RuntimeError, match="a link is down"):
            calls(PLANS["staged"], kernel(), 2 * TIMES)
    assert stopped
    assert [group.resent for group in groups] == [{}] * 4
