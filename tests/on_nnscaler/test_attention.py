"""Our functions in nnscaler: cut on the sequence, trained on real ranks, equal to one process."""

from __future__ import annotations

import re
from typing import Any

import pytest
from ranks import Pool

from on_nnscaler import attention_models as models
from on_nnscaler import jobs
from on_nnscaler.jobs import Training

pytestmark = pytest.mark.nnscaler

FUNCTIONS = (
    models.ring,
    models.ring_with_everything,
    models.ring_by_rows,
    models.zigzag,
    models.varlen,
    models.varlen_by_rows,
    models.window,
    models.packed_window,
    models.streaming,
    models.packed_streaming,
    models.masked,
    models.shuffled,
    models.shuffled_documents,
)


def training_of(attend: Any, policy: Any = "cp_follow", **further: Any) -> Training:
    batch = models.packed_batch if attend in models.PACKED else models.batch
    return Training(models.model(attend, further.pop("kv_heads", 2)), batch, policy, **further)


@pytest.mark.parametrize("attend", FUNCTIONS)
def test_two_ranks(two_ranks: Pool, attend: Any) -> None:
    training = training_of(attend, plan=2)
    ranks = two_ranks.run(jobs.train, training)
    jobs.assert_equals_alone(ranks, training)
    for n, rank in enumerate(ranks):
        calls = re.findall(r"= customized_ops\S*_attn\w*\(.*\)", rank.code)
        told = f"q_rows=({n}, 2)" if "rows" in attend.__name__ else "process_group=[0, 1]"
        assert len(calls) == 2 and all(told in call for call in calls), calls
