"""Ops of a user's own, registered with annotations.register_op alone, in nnscaler."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
from ranks import Pool

from on_nnscaler.models import own_ops
from on_nnscaler.models import plain_models as models
from on_nnscaler.support import autodist, jobs, policies

pytestmark = pytest.mark.nnscaler


@pytest.mark.parametrize("cut", ["l", "b", "d"])
def test_one_that_communicates(four_ranks: Pool, cut: str) -> None:
    policy = partial(policies.attention, cuts=[(cut, 2)], name="centre")
    ranks = jobs.trained(four_ranks, jobs.Training(own_ops.model, models.batch, policy, plan=2))
    for n, rank in enumerate(ranks):
        [call] = re.findall(r"= (torch\.ops\.own\.centre\(.*\))", rank.code)
        first = n - n % 2
        group = f"group=annotations.groups.name_of_ranks(({first}, {first + 1}))"
        assert (f"tokens=8, {group}" in call) == (cut == "l")


def test_one_that_does_not(two_ranks: Pool) -> None:
    policy = partial(policies.attention, cuts=[("a", 2)], name="rms_norm")
    ranks = jobs.trained(two_ranks, jobs.Training(own_ops.model, models.batch, policy, plan=2))
    assert "torch.ops.own.rms_norm(x=" in ranks[0].code
    assert re.search(r"^rms_norm +1 +a / 2$", ranks[0].plan, re.M)


@pytest.mark.parametrize(
    ("op", "used"),
    [
        ("centre_and_mean", (0,)),
        ("centre_and_mean", (1,)),
        ("centre_and_mean", (0, 1)),
        ("centre_and_mean_whole", (1,)),
        ("centre_and_mean_whole", (0, 1)),
        ("average", (0,)),
    ],
)
def test_results_that_a_communicating_split_leaves_whole(
    two_ranks: Pool, op: str, used: tuple[int, ...]
) -> None:
    """Their gradients count once, whoever of the ranks computes them."""
    policy = partial(policies.attention, cuts=[("l", 2)], name=op)
    model = partial(own_ops.means, op, used)
    ranks = jobs.trained(two_ranks, jobs.Training(model, models.batch, policy, plan=2))
    call = r"= annotations\.codegen\.gradient_shares\.divided\(torch.*\), (\(.*\))\)"
    divided = re.findall(call, ranks[0].code)
    of = {"average": ["(2,)"], "centre_and_mean": ["(1, 2)"], "centre_and_mean_whole": []}
    assert divided == of[op]


@pytest.mark.parametrize("policy", ["cp", "cp_follow", "autodist"])
def test_policies(two_ranks: Pool, tmp_path: Path, policy: str) -> None:
    config = {"pas_config": autodist.settings(tmp_path)}
    job = jobs.Training(own_ops.model, models.batch, policy, plan=2, config=config)
    ranks = jobs.trained(two_ranks, job)
    cut = re.findall(r"^centre +1 +(.*)$", ranks[0].plan, re.M)
    assert cut == ["l / 2"] or policy == "autodist"
    for file in (tmp_path / "profile").rglob("*own_ops*.json"):
        assert max(t["fw_span"] for t in json.loads(file.read_text()).values()) < 1000
