"""Groups are made by their members alone, whoever asks first and whatever they made before."""

from __future__ import annotations

import pytest
from ranks import Pool

from on_nnscaler.models import attention_models as models
from on_nnscaler.models.attention_models import groups_of, training
from on_nnscaler.support import jobs, late

pytestmark = pytest.mark.nnscaler


@pytest.mark.parametrize(
    ("last", "before"),
    [
        ((0, 2), ()),
        ((1, 3), ()),
        ((0, 1), ((1, 2),)),
        ((0, 3), ((1, 2), (0, 2, 3), (0, 3))),
    ],
)
def test_who_asks_last(
    four_ranks: Pool, last: tuple[int, ...], before: tuple[tuple[int, ...], ...]
) -> None:
    job = training(models.ring, plan=2, steps=1)
    ranks = four_ranks.run(late.train, job, last, before)
    jobs.assert_equals_alone(ranks, job)
    assert [groups_of(rank.code) for rank in ranks] == 2 * [{(0, 1)}] + 2 * [{(2, 3)}]
