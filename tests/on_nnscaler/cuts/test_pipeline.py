"""Two pipeline stages of two layers, on real ranks, equal plain torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from ranks import Pool

from on_nnscaler.models import attention_models
from on_nnscaler.models import plain_models as models
from on_nnscaler.support import jobs, policies
from on_nnscaler.support.jobs import Training

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
    jobs.trained(four_ranks, training)


@pytest.mark.parametrize("attend", [attention_models.ring, attention_models.varlen])
def test_attention_cut_inside_stages(four_ranks: Pool, attend: Any) -> None:
    training = attention_models.training(
        attend,
        policies.two_stages_on_sequence,
        plan=4,
        micro_batches=4,
        end2end=True,
        config={"pas_config": {"pipeline_nmicros": 4, "pipeline_scheduler": "1f1b"}},
    )
    ranks = jobs.trained(four_ranks, training)
    groups = [attention_models.groups_of(rank.code) for rank in ranks]
    assert groups == [{(0, 1)}, {(0, 1)}, {(2, 3)}, {(2, 3)}]
