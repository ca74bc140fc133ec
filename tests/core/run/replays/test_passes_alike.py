"""Passes that gather keys of packed documents share tapes, whatever their documents."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
from flash4_compiling import Compiling, install_compiling
from one_sided_memory import InProcessOneSided
from replay_cases import SEEN
from torch import Tensor

from customized_ops.ring_attention.core import tape
from customized_ops.ring_attention.core.comm import Comm
from customized_ops.ring_attention.core.comm.comm_groups import FakeComm
from customized_ops.ring_attention.core.comm.inprocess import run_ranks
from customized_ops.ring_attention.core.comm.patience import PeerFailed
from customized_ops.ring_attention.core.kernels import BackwardOperands, ForwardOperands, Scoring
from customized_ops.ring_attention.core.kernels.adapters import flash4
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.core.run.call_pairs import prepare
from customized_ops.ring_attention.core.run.executor import attention_backward, attention_forward
from customized_ops.ring_attention.core.run.replays import passes_alike, replay
from customized_ops.ring_attention.core.tape import record

TOKENS, HEADS, DIM = 192, (4, 2), 8
SCORING = Scoring(0.3)
TAKING_MEMORY = 3  # steps of a new group, after which its tapes begin anew


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, replays: list[int]) -> Compiling:
    return install_compiling(monkeypatch, SEEN)


def planned(ends: Sequence[int], ranks: int = 2, window: int = -1, **options: Any) -> Plan:
    """The plan of contiguous shards of these documents."""
    mask = AttnMask.varlen([0, *ends], causal=True, window=(window, 0 if window >= 0 else -1))
    return make_plan(mask, Layout.contiguous(ends[-1], ranks), heads=HEADS, **options)


def step(plan: Plan, comm: Comm, seed: int, **options: Any) -> list[Tensor]:
    """out, lse, dq, dk and dv of a rank."""
    q, k, v, dout = (plan.q_layout.shard(t, comm.rank) for t in drawn(seed, plan.mask.q_len))
    with comm.doing("a step"):
        out, lse = attention_forward(plan, comm, flash4, ForwardOperands(q, k, v), SCORING)
        given = BackwardOperands(dout, q, k, v, out, lse)
        return [out, lse, *attention_backward(plan, comm, flash4, given, SCORING, **options)]


def drawn(seed: int, tokens: int) -> list[Tensor]:
    """q, k, v and dout."""
    source = torch.Generator().manual_seed(seed)
    of_heads = HEADS[0], HEADS[1], HEADS[1], HEADS[0]
    sizes = [(1, tokens, n, DIM) for n in of_heads]
    return [torch.randn(s, dtype=torch.float64, generator=source) for s in sizes]


def wanted(ends: Sequence[int], seed: int, window: int = -1) -> list[Tensor]:
    """The same on one device."""
    plan = planned(ends, 1, window)
    with replay.replay(False):
        return run_ranks(1, lambda comm: step(plan, comm, seed))[0]


def require_right(
    plans: Sequence[Plan], found: Sequence[Sequence[Sequence[Tensor]]], window: int = -1
) -> None:
    """Results by rank and step, to 1e-10."""
    for n, plan in enumerate(plans):
        ends = plan.mask.slices[:, 1].tolist()
        for name, want in zip(
            ("out", "lse", "dq", "dk", "dv"), wanted(ends, n, window), strict=True
        ):
            dim = 2 if name == "lse" else 1
            at = ["out", "lse", "dq", "dk", "dv"].index(name)
            mine = torch.cat([of_rank[n][at] for of_rank in found], dim)
            torch.testing.assert_close(mine, want, rtol=0, atol=1e-10, msg=f"step {n}: {name}")


def of_ends(*several: Sequence[int], **options: Any) -> list[Plan]:
    return [planned(ends, **options) for ends in several]


def test_one_tape_does_for_other_documents(library: Compiling, replays: list[int]) -> None:
    """Of batches that come once each, the first are asked of the library, and no others."""
    several = (88, 140), (89, 120), (91,), (90, 100, 160), (89, 92, 100, 110), (88,)
    plans = of_ends(*((*ends, TOKENS) for ends in (*several, (89, 99), (90, 150), (91, 101, 111))))
    before: list[tuple[int, int]] = []

    def body(comm: Comm) -> list[list[Tensor]]:
        results = [step(plan, comm, n) for n, plan in enumerate(plans[: TAKING_MEMORY + SEEN + 1])]
        comm.all_gather_object(None)
        before.append((library.called, len(replays)))
        comm.all_gather_object(None)
        return [
            *results,
            *(step(plan, comm, len(results) + n) for n, plan in enumerate(plans[len(results) :])),
        ]

    found = run_ranks(2, body)
    later = len(plans) - TAKING_MEMORY - SEEN - 1
    assert before == [(library.called, len(replays) - 2 * 2 * later)] * 2
    require_right(plans, found)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("window", [-1, 9])
def test_random_documents(library: Compiling, replays: list[int], ranks: int, window: int) -> None:
    draw = random.Random(10 * ranks + window)
    shard = TOKENS // ranks
    ends = []
    for n in range(24):
        crossing = [at - draw.randint(1, 4) for at in range(shard, TOKENS, shard)]
        others = draw.sample(range(1, TOKENS), draw.randint(0, 3)) if n % 3 else []
        ends.append(sorted({*crossing, *others}))
    plans = of_ends(*((*each, TOKENS) for each in ends), ranks=ranks, window=window)
    options = [{"deterministic": draw.random() < 0.2} for _ in plans]

    def body(comm: Comm) -> list[list[Tensor]]:
        return [
            step(plan, comm, n, **given)
            for n, (plan, given) in enumerate(zip(plans, options, strict=True))
        ]

    require_right(plans, run_ranks(ranks, body), window)
    assert len(replays) > ranks


def test_alike_is_what_gives_equal_tapes(library: Compiling) -> None:
    """Of any two plans whose passes are said to be alike, the tapes differ in nothing."""
    draw = random.Random(3)
    ends = [(*sorted(draw.sample(range(80, 112), draw.randint(1, 3))), TOKENS) for _ in range(40)]
    plans = of_ends(*ends)

    def body(comm: Comm) -> list[tuple[Any, Any]]:
        found: list[tuple[Any, Any]] = []
        for n, plan in enumerate(plans):
            if n % 2:
                prepare(plan, comm.rank)
            given = ForwardOperands(
                *(plan.q_layout.shard(t, comm.rank) for t in drawn(n, TOKENS)[:3])
            )
            step(plan, comm, n)  # it takes memory
            kind, tables = passes_alike.alike(plan, comm, flash4, given, deterministic=False)
            run = partial(attention_forward, plan, comm, flash4, given, SCORING)
            found.append(((kind, "f", comm.replay_state()), tape_of(run, (*given, *tables))))
            out, lse = run()
            back = BackwardOperands(torch.ones_like(out), *given, out, lse)
            kind, tables = passes_alike.alike(plan, comm, flash4, back, deterministic=False)
            run = partial(attention_backward, plan, comm, flash4, back, SCORING)
            found.append(((kind, "b", comm.replay_state()), tape_of(run, (*back, *tables))))
        return found

    with replay.replay(False):
        of_ranks = run_ranks(2, body)
    for of_rank in of_ranks:
        kinds = {kind for kind, _ in of_rank if kind[0] is not None}
        assert 2 < len(kinds) < 25, "some are alike, some are not"
        for (kind, one), (other_kind, other) in combinations(of_rank, 2):
            if kind == other_kind and kind[0] is not None:
                assert steps_of(one) == steps_of(other)


def tape_of(run: Callable[[], Any], read: Sequence[Tensor]) -> tape.Tape:
    with flash4.watched():
        _, made = record(run, read)
    assert made is not None
    return made


def steps_of(made: tape.Tape) -> list[Any]:
    """Its steps without the identity of tensors."""
    return [
        (
            step.function,
            [geometry(a) if torch.is_tensor(a) else plain(a) for a in step.arguments],
            *step[2:],
        )
        for step in made.steps
    ]


def geometry(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.data_ptr()


def plain(argument: Any) -> Any:
    """Without what a stand-in is given by name, of which tables differ."""
    return argument if not isinstance(argument, tuple) else str(argument)


def test_passes_that_differ(library: Compiling) -> None:
    """In what moves, in the rows that attend, or in the call."""
    base = planned((89, 140, 192))
    others = {
        "as many keys": (planned((91, 120, 150, 192)), True),
        "more keys": (planned((80, 140, 192)), False),
        "all documents are whole": (planned((96, 192)), False),
        "many documents": (planned((*range(57, 91, 2), *range(98, 132, 2), 192)), False),
        "fewer tokens": (planned((88, 140, 190)), False),
        "a window": (planned((88, 140, 192), window=9), False),
        "staged": (planned((88, 140, 192), stages=1), False),
        "no more keys than needed": (base.variant(rounded=False), False),
    }

    def kind(plan: Plan, comm: Comm) -> Any:
        given = ForwardOperands(
            *(plan.q_layout.shard(t, comm.rank) for t in drawn(0, plan.mask.q_len)[:3])
        )
        return passes_alike.alike(plan, comm, flash4, given, deterministic=False)[0]

    def body(comm: Comm) -> dict[str, bool]:
        same = kind(base, comm)
        assert same is not None
        return {name: kind(plan, comm) == same for name, (plan, _) in others.items()}

    for found in run_ranks(2, body):
        assert found == {name: alike for name, (_, alike) in others.items()}


def test_ranks_that_do_not_agree_are_told(library: Compiling) -> None:
    """Signals of a shared tape carry the fingerprint of the pass that runs."""
    plans = of_ends((88, 192), (89, 120, 192), (91, 192), (90, 100, 192), (89, 192), (90, 192))

    def body(comm: Comm) -> None:
        for n, plan in enumerate(plans):
            step(plan, comm, n)
        assert isinstance(comm, InProcessOneSided)
        step(plans[comm.rank], comm, 9)  # whose passes are alike

    with pytest.raises(PeerFailed, match="do not agree on the mask or the documents"):
        run_ranks(2, body)


def test_a_tape_with_other_tensors_is_not_shared(
    library: Compiling, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a pass that reads a tensor which it does not name."""
    plans = of_ends((88, 192), (89, 120, 192), (91, 192), (90, 100, 192), (89, 192))
    whole = replay.record

    def recorded(run: Any, read: Any) -> Any:
        def and_more() -> Any:
            results = run()
            tape.launch(Tensor.add_, results[0], torch.tensor(0.0, dtype=torch.float64))
            return results

        return whole(and_more, read)

    monkeypatch.setattr(replay, "record", recorded)
    run_ranks(2, lambda comm: [step(plan, comm, n) for n, plan in enumerate(plans)])
    assert not replays


@pytest.mark.parametrize("what", ["rows", "keys"])
def test_rows_and_keys_are_told_apart(library: Compiling, replays: list[int], what: str) -> None:
    """Passes in which as much moves, and fewer rows attend, or other keys are sent."""

    def of(*slices: tuple[int, ...]) -> Plan:
        mask = AttnMask.from_slices(slices, TOKENS, TOKENS)
        layout = Layout.contiguous(TOKENS, 2)
        return make_plan(mask, layout, heads=HEADS, stages=0, assignment="owner")

    if what == "rows":
        first = 0, 90, 0, 90, -99, 0
        plans = [of(first, (90, last, 90, 192, -192, 192)) for last in (192, 180, 170)] * 4
    else:
        own = [(n, n + 96, n, n + 96, -192, 0) for n in (0, 96)]
        plans = [of(*own, (96, 192, n, n + 8, -192, 192)) for n in (80, 40)] * 6

    def body(comm: Comm) -> list[list[Tensor]]:
        return [step(plan, comm, n) for n, plan in enumerate(plans)]

    with replay.replay(False):
        want = run_ranks(2, body)
    for mine, theirs in zip(run_ranks(2, body), want, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            for x, y in zip(a, b, strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=1e-10)
    assert replays


def test_ranks_that_send_messages_share_nothing(library: Compiling) -> None:
    plan, (q, k, v, _) = planned((88, 140, 192)), drawn(0, TOKENS)
    given, comm = ForwardOperands(q, k, v), FakeComm(1, 2)
    assert passes_alike.alike(plan, comm, flash4, given, deterministic=False)[0] is None
