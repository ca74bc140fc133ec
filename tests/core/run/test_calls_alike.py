"""Kernel calls that are launched alike share a tape, and no others do."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flash4_compiling import Compiling, install_compiling

from customized_ops.ring_attention.core import tape
from customized_ops.ring_attention.core.kernels import (
    BackwardOperands,
    ForwardOperands,
    Pairs,
    Scoring,
)
from customized_ops.ring_attention.core.kernels.adapters import flash4, reference
from customized_ops.ring_attention.core.kernels.adapters.flash4_parts import flash4_choice
from customized_ops.ring_attention.core.mask.slices import UNBOUNDED, as_slices, normalise
from customized_ops.ring_attention.core.run.replays import replay, seen_before
from customized_ops.ring_attention.core.run.replays.seen_before import Kinds, Seen

SEEN = 2  # calls before one is recorded
SCORING = Scoring(0.3)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Compiling:
    return install_compiling(monkeypatch, SEEN)


def documents(*ends: int, low: int = -UNBOUNDED, rows: int = 0, first: int = 0) -> Pairs:
    """Causal documents in ``rows`` rows and keys, or as many as they have."""
    count = rows or ends[-1]
    slices = [(a, b, a, b, low, 0) for a, b in pairwise((first, *ends))]
    return Pairs(normalise(as_slices(slices)), count, count)


def drawn(pairs: Pairs, seed: int, batch: int = 1, e: int = 8) -> tuple[Any, Any]:
    """The operands of a forward and of its backward."""
    source = torch.Generator().manual_seed(seed)

    def draw(length: int, heads: int, d: int) -> torch.Tensor:
        return torch.randn(batch, length, heads, d, dtype=torch.float64, generator=source)

    given = ForwardOperands(
        draw(pairs.q_len, 4, 8), draw(pairs.k_len, 2, 8), draw(pairs.k_len, 2, e)
    )
    out, lse = reference.forward(given, pairs, SCORING, None)
    return given, BackwardOperands(draw(pairs.q_len, 4, e), *given, out, lse, None)


def attend(pairs: Pairs, seed: int, *, deterministic: bool = False, **kind: int) -> None:
    """A forward and a backward, which are right."""
    given, operands = drawn(pairs, seed, **kind)
    out, lse = replay.kernel_forward(flash4, given, pairs, SCORING)
    grads = replay.kernel_backward(flash4, operands, pairs, SCORING, deterministic=deterministic)
    want = operands.out, operands.lse, *reference.backward(operands, pairs, SCORING, None)
    for mine, his in zip((out, lse, *grads), want, strict=True):
        torch.testing.assert_close(mine, his, rtol=0, atol=1e-10)


def asked(library: Compiling, first: Pairs, second: Pairs, **options: Any) -> int:
    """How often a second call asks the library, after the first was recorded."""
    for seed in range(SEEN + 2):
        attend(first, seed)
    called = library.called
    assert called == 2 * (SEEN + 1), "recorded"
    attend(second, 9, **options)
    return library.called - called


BASE = documents(30, 70, 120)
LONG = documents(300, 500, 800)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (BASE, documents(50, 60, 120)),
        (BASE, documents(119, 120)),
        (documents(120), documents(120)),
        (documents(40, 100, rows=120, first=10), documents(60, 100, rows=120, first=10)),
        (documents(40, 80, 120, low=-9), documents(50, 70, 120, low=-9)),
        (documents(*range(5, 121, 5)), documents(*range(1, 25), 120)),
        (LONG, documents(200, 500, 800)),
    ],
)
def test_other_documents(library: Compiling, first: Pairs, second: Pairs) -> None:
    assert asked(library, first, second) == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (BASE, documents(30, 70, 120, low=-9)),
        (LONG, documents(800)),
        (BASE, documents(*range(5, 80, 5), 120)),  # a longer table
        (BASE, documents(30, 70, 119)),
        (BASE, documents(30, 70, 119, rows=120)),
        (BASE, documents(30, 70, 120, first=1)),
        (documents(40, 100, rows=120, first=10), documents(40, 101, rows=120, first=10)),
        (LONG, documents(100, 200, 800)),  # the longest
        (documents(120), Pairs(as_slices([(0, 120, 0, 120, -UNBOUNDED, 120)]), 120, 120)),
    ],
)
def test_calls_that_differ(library: Compiling, first: Pairs, second: Pairs) -> None:
    assert asked(library, first, second) == 2


def test_options_and_batches_that_differ(library: Compiling) -> None:
    assert asked(library, BASE, BASE, deterministic=True) == 1, "the backward alone"
    for kind in ({"batch": 2}, {"e": 6}):  # of which only the same pairs are known to be alike
        for seed in range(SEEN + 2):
            attend(BASE, seed, **kind)
        called = library.called
        attend(documents(50, 60, 120), 9, **kind)
        assert library.called == called + 2


@pytest.mark.parametrize("e", [8, 6])
def test_block_lists_are_of_their_pairs(
    library: Compiling, monkeypatch: pytest.MonkeyPatch, e: int
) -> None:
    monkeypatch.setattr(flash4_choice, "CALL_SECONDS", 1e9)

    def sinks(*ends: int) -> Pairs:
        slices = [(a, b, a, b, -UNBOUNDED, 0) for a, b in pairwise((0, *ends))]
        far = [(a, b, 0, 2, -UNBOUNDED, UNBOUNDED) for a, b in pairwise(ends)]
        return Pairs(normalise(as_slices([*slices, *far])), ends[-1], ends[-1])

    first, second = sinks(200, 400, 520), sinks(200, 300, 520)
    for seed in range(SEEN + 2):
        attend(first, seed, e=e)
    attend(second, 9, e=e)
    assert [flash4.alike(given, first) for given in drawn(first, 0, e=e)] == [None, None]


def test_what_a_tape_has_inside_arguments_is_a_constant() -> None:
    x, inside = torch.ones(2), torch.zeros(2)
    more = lambda: (tape.launch(len, (inside, 3)) and tape.computed(torch.neg, x),)  # noqa: E731
    _, made = tape.record(more, (x,))
    assert made is not None and [t is inside for t in made.constants] == [True]


def test_a_tape_with_constants_is_not_shared(library: Compiling) -> None:
    """As of a kernel that reads a tensor which it does not name."""

    def forward(given: ForwardOperands, pairs: Pairs, *_: Any) -> tuple[torch.Tensor, ...]:
        table = torch.tensor([float(len(pairs.slices))])
        out = tape.allocate(torch.empty_like, given.q)
        tape.launch(lambda to, held: to.copy_(held[0].expand_as(to)), out, (table,))
        return (out,)

    kernel: Any = SimpleNamespace(
        NAME="reads more",
        watched=nullcontext,
        unproven_tapes=lambda: None,
        alike=lambda *_, **__: ("one kind", []),
        forward=forward,
    )
    for pairs in (BASE, documents(50, 120)):
        for seed in range(SEEN + 2):
            (out,) = replay.kernel_forward(kernel, drawn(pairs, seed)[0], pairs, SCORING)
            assert (out == len(pairs.slices)).all()


def test_a_pass_takes_over_the_steps_of_its_calls(library: Compiling) -> None:
    other = documents(50, 60, 120)
    for seed in range(SEEN + 2):
        attend(BASE, seed)
    called, (given, _) = library.called, drawn(other, 5)
    run = partial(replay.kernel_forward, flash4, given, other, SCORING)
    _, made = tape.record(run, given)
    assert made is not None and library.called == called
    given, operands = drawn(other, 6)
    for mine, his in zip(made.run(given), operands[4:6], strict=True):
        torch.testing.assert_close(mine, his, rtol=0, atol=1e-10)


def test_lengths_that_were_many_do_not_end_replays(
    library: Compiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seen_before, "MOST_KEPT", 32)
    for length in range(60, 60 + seen_before.MOST_KEPT + 4):
        attend(documents(length), 0)
    called = library.called
    for seed in range(SEEN + 6):
        attend(documents(200), seed)
    assert library.called == called + 2 * (SEEN + 1)


def test_threads_share_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_before, "MOST_KINDS", 4)
    kinds, errors = Kinds(), list[BaseException]()

    def work(thread: int) -> None:
        try:
            for n in range(3000):
                assert isinstance(kinds.of((n + thread) % 6), Seen)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(kinds) == 4


def test_calls_of_a_recorded_pass_are_not_taken_to_come_once(library: Compiling) -> None:
    """Calls of other new lengths are still recorded the first time."""
    called = []
    for batch in range(8):
        for n in range(2):
            once = documents(30, 200 + 2 * batch + n)
            given, _ = drawn(once, n)
            tape.record(partial(replay.kernel_forward, flash4, given, once, SCORING), given)
        before, pairs = library.called, documents(30, 60 + batch)
        for layer in range(2 * seen_before.OFTEN):
            attend(pairs, layer)
        called.append(library.called - before)
    assert called[-4:] == [2] * 4


def test_layers_with_scales_of_their_own_are_replayed(library: Compiling) -> None:
    """As in models that divide scores by the number of the layer; calls without a kind."""
    for n in range(SEEN + 3):
        if n == SEEN + 1:
            called = library.called
        for layer in range(48):
            scoring = Scoring(0.3 / (layer + 1))
            replay.kernel_forward(flash4, drawn(BASE, n, batch=2)[0], BASE, scoring)
    assert library.called == called


def test_the_oldest_of_many_calls_of_the_same_pairs_makes_room(
    library: Compiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seen_before, "MOST_KEPT", 8)
    for n in range(seen_before.MOST_KEPT + 4):
        replay.kernel_forward(flash4, drawn(BASE, n)[0], BASE, Scoring(0.1 + n / 100))
    called = library.called
    for n in range(SEEN + 4):
        replay.kernel_forward(flash4, drawn(BASE, n)[0], BASE, Scoring(0.9))
    assert library.called == called + SEEN + 1


def test_a_kind_that_cannot_be_recorded_is_rarely_tried(
    library: Compiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    whole = replay.record
    monkeypatch.setattr(
        replay, "record", lambda *given: tried.append(1) or (whole(*given)[0], None)
    )
    for n in range(20):
        pairs = documents(30 + n, 120)
        for layer in range(2 * seen_before.OFTEN):
            attend(pairs, layer)
    assert 2 <= len(tried) <= 6
