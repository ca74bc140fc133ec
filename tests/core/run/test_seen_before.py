"""What is recorded where plans change: nothing that would not come often enough to pay."""

from __future__ import annotations

import gc
import weakref

import pytest

from customized_ops.ring_attention.core.run.replays import seen_before
from customized_ops.ring_attention.core.run.replays.seen_before import (
    OFTEN,
    SEEN_BEFORE,
    Kinds,
    Seen,
    SeenBefore,
)
from customized_ops.ring_attention.core.tape import Tape


class Batch:
    """Stands for a plan."""


def recorded(
    among: SeenBefore[Batch], batch: Batch, calls: int, kinds: int = 2, *, fails: bool = False
) -> int:
    """How many calls of a batch are recorded, or would be but for a failure; each comes with its
    backward."""
    found = 0
    for _ in range(calls):
        for kind in range(kinds):
            seen = among.of(batch).seen.setdefault(kind, Seen())
            if seen.tape is None and seen.is_due() and seen.is_recorded(among):
                found += 1
                seen.tape = None if fails else Tape((), (), ())
    return found


def test_what_comes_again_is_recorded_once() -> None:
    among: SeenBefore[Batch] = SeenBefore()
    batch = Batch()
    assert recorded(among, batch, SEEN_BEFORE) == 0
    assert recorded(among, batch, 1, fails=True) == 2
    assert recorded(among, batch, 9 * SEEN_BEFORE) == 2, "if it could not be, ten times as late"
    assert recorded(among, batch, 100 * SEEN_BEFORE) == 0


@pytest.mark.parametrize("layers", [OFTEN - 1, OFTEN, SEEN_BEFORE, SEEN_BEFORE + 2])
def test_batches_of_new_lengths(layers: int) -> None:
    """Where each comes more than ten times, the first two are recorded late and the others soon;
    where four times, all but the first two; else none."""
    among: SeenBefore[Batch] = SeenBefore()
    counts = [recorded(among, Batch(), layers) for _ in range(12)]
    assert counts[:2] == [2 * (layers > SEEN_BEFORE)] * 2
    assert counts[2:] == [2 * (layers >= OFTEN)] * 10
    assert recorded(among, Batch(), 1) == counts[-1], "at the first call"


def test_batches_that_will_come_often_are_recorded_soon() -> None:
    among: SeenBefore[Batch] = SeenBefore()
    batches = [Batch() for _ in range(3)]
    for batch in batches[:2]:
        assert recorded(among, batch, SEEN_BEFORE) == 0
        assert recorded(among, batch, 2 * SEEN_BEFORE) == 2
    now = [recorded(among, batches[2], 1, fails=True) for _ in range(SEEN_BEFORE)]
    assert now == [2] + [0] * 9
    assert recorded(among, batches[2], SEEN_BEFORE) == 2, "if it could not be, once more"


def test_parts_of_a_batch_are_not_those_before_it() -> None:
    """Pairs of the same plan, attended in turn: none of them has gone."""
    among: SeenBefore[Batch] = SeenBefore()
    parts = [Batch() for _ in range(6)]
    counts = [recorded(among, part, 1) for _ in range(SEEN_BEFORE + 1) for part in parts]
    assert counts[: len(parts) * SEEN_BEFORE] == [0] * len(parts) * SEEN_BEFORE
    assert counts[-len(parts) :] == [2] * len(parts)


def test_what_stays_after_many_that_went() -> None:
    """As a training of one length after warm_up."""
    among: SeenBefore[Batch] = SeenBefore()
    for _ in range(16):
        recorded(among, Batch(), 1)
    stays = Batch()
    assert recorded(among, stays, SEEN_BEFORE) == 0 and recorded(among, stays, 1) == 2


def test_the_latest_kinds_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_before, "MOST_KINDS", 2)
    kinds = Kinds()
    first = kinds.of("one")
    for kind in ("two", "one", "three"):
        kinds.of(kind)
    assert list(kinds) == ["one", "three"] and kinds.of("one") is first


def test_nothing_is_kept_of_what_is_gone() -> None:
    among: SeenBefore[Batch] = SeenBefore()
    batch = Batch()
    recorded(among, batch, 3)
    gone = weakref.ref(batch)
    gc.disable()
    try:
        del batch
        assert gone() is None and not among.known
    finally:
        gc.enable()
