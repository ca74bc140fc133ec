"""What the other ranks see when one fails: an error that says what happened, long before the time
that a rank waits in vain."""

from __future__ import annotations

import re
import time

import fault_jobs
import pytest
from fault_jobs import BAD_INPUTS, LATE_SECONDS, MOMENTS
from ranks import JobFailed, Pool


def in_vain(pool: Pool) -> float:
    """Seconds that a rank waits for one that does not come; an answer, on a machine however busy,
    takes a small part of that."""
    return pool.seconds / 2


def said_after(pool: Pool, fault: str, moment: str, faulty: int) -> list[str]:
    """What each rank says after a fault of one."""
    started = time.monotonic()
    with pytest.raises(JobFailed) as failed:
        pool.run(fault_jobs.steps, faulty, fault, moment)
    assert time.monotonic() - started < in_vain(pool)
    return re.split(r"^rank \d+:$", str(failed.value), flags=re.MULTILINE)[1:]


@pytest.fixture(scope="module")
def pool() -> Pool:
    """Its processes die in these tests, so nobody else uses it."""
    made = Pool(3)
    yield made
    made.close()


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_rank(pool: Pool, moment: str) -> None:
    said = said_after(pool, "killed", moment, faulty=1)
    assert "the process died" in said[1]
    for rank in (0, 2):
        assert "PeerFailed: wrap_ring_attn_func, " in said[rank], said[rank]
        assert f"rank {rank} of the group of ranks [0, 1, 2]" in said[rank]
        assert "lost rank 1: its process ended" in said[rank], said[rank]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_out_of_memory(pool: Pool, moment: str) -> None:
    said = said_after(pool, "out of memory", moment, faulty=2)
    direction, _ = MOMENTS[moment]
    assert "OutOfMemoryError: CUDA out of memory" in said[2]
    for rank in (0, 1):
        assert (
            f"rank {rank} of the group of ranks [0, 1, 2] cannot go on: rank 2 failed in "
            f"wrap_ring_attn_func, {direction}: OutOfMemoryError: CUDA out of memory"
        ) in said[rank], said[rank]


@pytest.mark.parametrize("what", fault_jobs.ALONG)
def test_a_kernel_along_the_sequence_that_fails_on_one_rank(pool: Pool, what: str) -> None:
    started = time.monotonic()
    with pytest.raises(JobFailed) as failed:
        pool.run(fault_jobs.along_a_sequence, 0, what)
    assert time.monotonic() - started < in_vain(pool)
    said = re.split(r"^rank \d+:$", str(failed.value), flags=re.MULTILINE)[1:]
    assert "OutOfMemoryError: CUDA out of memory" in said[0]
    for each in said[1:]:
        assert f"rank 0 failed in {what}: OutOfMemoryError: CUDA out of memory" in each, each


def test_a_late_rank_is_waited_for_and_named(pool: Pool) -> None:
    (_, first), (seconds, late), (_, third) = pool.run(fault_jobs.steps, 1, "late", "forward")
    assert seconds >= LATE_SECONDS and not late
    for rank, warned in ((0, first), (2, third)):
        assert len(warned) == 1
        assert f"rank {rank} of the group of ranks [0, 1, 2] has waited 3 s" in warned[0]
        assert "rank 1 has not come" in warned[0]


def test_a_rank_that_does_not_come_is_named(pool: Pool) -> None:
    (first,), missing, (third,) = pool.run(fault_jobs.absent, 1)
    assert not missing
    for warned in (first, third):
        assert warned.startswith("wrap_ring_attn_func, where ranks compare their calls: ")
        assert warned.endswith("has waited 3 s: rank 1 has not come")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:wrap_ring_attn_func")
def test_a_late_rank_after_passes_of_one_rank_alone(pool: Pool) -> None:
    assert pool.run(fault_jobs.late_after_passes_alone, 1) == ["no error"] * 3


def of_ranks_elsewhere(how: str) -> list[str]:
    """What two ranks say that wait in calls that differ, long before the group's timeout."""
    ranks = Pool(2)
    try:
        started = time.monotonic()
        said = ranks.run(fault_jobs.is_elsewhere, 1, how)
        assert time.monotonic() - started < in_vain(ranks)
    finally:
        ranks.close(patience=0)
    return said


def test_ranks_that_wait_in_other_passes() -> None:
    """Each for keys that the other's call does not send."""
    for said in of_ranks_elsewhere("window"):
        assert said.startswith("PeerFailed: wrap_ring_attn_func, forward: rank "), said
        assert "do not agree on the mask" in said, said


def test_a_length_that_one_rank_alone_meets() -> None:
    """It waits for its peer's length, which waits for its keys."""
    said = of_ranks_elsewhere("length")
    lengths = "wrap_ring_attn_func, where ranks compare how many tokens they hold"
    elsewhere = "and rank 1 do not make the same calls in the same order: it waits in " + lengths
    assert "PeerFailed: wrap_ring_attn_func, forward: rank 0" in said[0]
    assert elsewhere in said[0] or f"rank 1 failed in {lengths}" in said[0], said
    assert said[1].startswith(f"PeerFailed: {lengths}: rank 1 "), said
    assert "do not make the same calls in the same order" in said[1], said


def test_a_wrong_input_on_one_rank(two_ranks: Pool) -> None:
    first, second = two_ranks.run(fault_jobs.bad_inputs, 1)
    assert len(BAD_INPUTS) >= 40
    for name in BAD_INPUTS:
        for seconds, text in (first[name], second[name]):
            assert "wrap_ring_attn_func" in text, (name, text)
            assert seconds < in_vain(two_ranks), name
        assert first[name][1].startswith("DisagreementError"), (name, first[name])
        assert "rank 1" in first[name][1] or "ranks" in first[name][1], (name, first[name])
