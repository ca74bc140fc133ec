"""Two pipeline stages of two layers, on real ranks, equal plain torch."""

from __future__ import annotations

from functools import partial

import pytest
from ranks import Pool

from on_nnscaler import jobs, models, policies
from on_nnscaler.jobs import Training

pytestmark = pytest.mark.nnscaler


@pytest.mark.parametrize("plan", [2, 4])
def test_two_stages(four_ranks: Pool, plan: int) -> None:
    training = Training(
        partial(models.tiny, layers=2),
        models.batch,
        policies.two_stages,
        plan=plan,
        micro_batches=4,
        end2end=True,
        config={"pas_config": {"pipeline_nmicros": 4, "pipeline_scheduler": "1f1b"}},
    )
    jobs.assert_equals_alone(four_ranks.run(jobs.train, training), training)
