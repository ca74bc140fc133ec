"""The chunked loss in nnscaler: cut on tokens, on the batch and on the vocabulary."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
from ranks import Pool

from on_nnscaler.models import loss_models
from on_nnscaler.support import autodist, jobs, policies

pytestmark = pytest.mark.nnscaler


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("cut", ["l", "b", "v"])
def test_two_ranks(two_ranks: Pool, reduction: str, cut: str) -> None:
    policy = partial(policies.attention, cuts=[(cut, 2)], name="checked_losses")
    model = loss_models.with_loss(reduction, biased=cut == "v")
    ranks = jobs.trained(two_ranks, jobs.Training(model, loss_models.batch, policy, plan=2))
    [call] = re.findall(r"= .*checked_losses\(.*\)", ranks[0].code)
    assert ("vocab_group=[0, 1], vocab_size=32" in call) == (cut == "v")


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_end_to_end(two_ranks: Pool, reduction: str) -> None:
    """nnscaler keeps track of every result of a call there, also of one that nobody uses."""
    policy = partial(policies.attention, cuts=[("l", 2)], name="checked_losses")
    model = loss_models.with_loss(reduction)
    jobs.trained(two_ranks, jobs.Training(model, loss_models.batch, policy, plan=2, end2end=True))


@pytest.mark.parametrize("name", ["vocab_group", "token_group"])
def test_groups_of_the_users_own_are_refused(tmp_path: Path, name: str) -> None:
    size = {"vocab_size": loss_models.VOCAB} if name == "vocab_group" else {}
    model = loss_models.with_loss("mean", **{name: [0, 1]}, **size)
    job = jobs.Training(model, loss_models.batch, "tp", plan=2)
    with pytest.raises(NotImplementedError, match=f"{name} is for calls without an engine"):
        jobs.generate(job, tmp_path / "code", ranks=2)


def test_all_cuts_are_timed(tmp_path: Path) -> None:
    config = {"pas_config": autodist.settings(tmp_path)}
    model = loss_models.with_loss("mean")
    job = jobs.Training(model, loss_models.batch, "autodist", plan=2, config=config)
    jobs.generate(job, tmp_path / "code", ranks=2)
    name = "customized_ops.chunk_linear_cross_entropy.loss.checked_losses"
    files = sorted((tmp_path / "profile" / "comp").glob(f"{name}*.json"))
    assert [file.name for file in files] == [f"{name}.json", f"{name}.v_in_2.json"]
    times = [t["fw_span"] for file in files for t in json.loads(file.read_text()).values()]
    assert len(times) == 4 and max(times) < 1000  # whole, b, l; v
