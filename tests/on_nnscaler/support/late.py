"""Training in which ranks ask for their groups at different times, after different other groups."""

from __future__ import annotations

import time
from unittest import mock

import torch.distributed as dist

from annotations import groups

from . import jobs


def train(
    training: jobs.Training, late: tuple[int, ...], before: tuple[tuple[int, ...], ...]
) -> jobs.Rank:
    """`jobs.train` with no group known; ``late`` ranks ask a while after their peers.

    ``before``: groups that their members make first, one after the other.
    """
    rank, make = dist.get_rank(), groups.group_of_ranks

    def make_late(ranks: tuple[int, ...]) -> object:
        if rank in late and ranks not in groups._by_ranks:
            time.sleep(1)
        return make(ranks)

    with mock.patch.dict(groups._by_ranks, clear=True):
        for members in before:
            if rank in members:
                groups.name_of_ranks(members)
        with mock.patch.object(groups, "group_of_ranks", make_late):
            return jobs.train(training)
