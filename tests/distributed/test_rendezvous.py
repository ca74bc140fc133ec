"""Ranks that were in other groups before find each other when they make symmetric memory."""

from __future__ import annotations

import rendezvous_jobs
from ranks import Pool, worlds

GROUPS = [(1, 2), (0, 2), (0, 1, 2, 3)]


@worlds(cpus=[4], gpus=[])
def test_whatever_groups_they_were_in(ranks: Pool) -> None:
    for rank, told in enumerate(ranks.run(rendezvous_jobs.make, GROUPS, True, 20)):
        assert told == [
            [f"{member}: {n + 1} bytes" for member in group]
            for n, group in enumerate(GROUPS)
            if rank in group
        ]


@worlds(cpus=[4], gpus=[])
def test_else_they_would_wait_for_ever(ranks: Pool) -> None:
    told = ranks.run(rendezvous_jobs.make, GROUPS[:2], False, 2)
    assert told[1] == [["1: 1 bytes", "2: 1 bytes"]] and told[2][0] == told[1][0]
    assert "imeout" in told[0][0] and "imeout" in told[2][1], told


@worlds(cpus=[2], gpus=[])
def test_a_rank_without_room_for_it(ranks: Pool) -> None:
    """All of them are told, and are at the same step after it."""
    told = "PeerFailed: rank 1 has no memory for what ranks exchange: OutOfMemoryError: 20 GiB"
    for _ in range(2):
        assert ranks.run(rendezvous_jobs.without_room, 1) == [told, "OutOfMemoryError: 20 GiB"]
