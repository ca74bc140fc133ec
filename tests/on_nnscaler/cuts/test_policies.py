"""Policies written by hand: the ops they name are cut, and training equals plain torch."""

from __future__ import annotations

import re
from typing import Any

import pytest
from ranks import Pool

from on_nnscaler.models import plain_models as models
from on_nnscaler.support import jobs, policies
from on_nnscaler.support.jobs import Training

pytestmark = pytest.mark.nnscaler


@pytest.mark.parametrize("policy", [policies.sequence_by_graph, policies.sequence_by_plans])
def test_on_the_sequence(two_ranks: Pool, policy: Any) -> None:
    ranks = jobs.trained(two_ranks, Training(models.tiny, models.batch, policy, plan=2))
    # Into q, k, v, up and head; out of q, k, v, down and head: nothing between up, gelu and down.
    assert len(re.findall(r"split_allgather\(.*dim=1", ranks[0].code)) == 5
    assert len(re.findall(r"allgather_split\(.*dim=1", ranks[0].code)) == 5


def test_two_cuts_of_one_op(four_ranks: Pool) -> None:
    training = Training(models.tiny, models.batch, policies.two_by_two, plan=4)
    ranks = jobs.trained(four_ranks, training)
    # Device n has batch entry n // 2, and of it part n % 2: it meets one other device for each cut.
    for n, rank in enumerate(ranks):
        met = re.findall(r"adapter\.\S*gather\(.*ranks=\[(\d), (\d)\]", rank.code)
        assert {tuple(map(int, pair)) for pair in met} == {
            (n - n % 2, n - n % 2 + 1),
            (n % 2, n % 2 + 2),
        }
