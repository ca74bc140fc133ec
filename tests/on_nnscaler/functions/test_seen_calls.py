"""Calls are ops wherever they are written; a policy that cuts attention and sees none says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import Pool

from annotations.errors import PartitionError
from on_nnscaler.models import call_models
from on_nnscaler.models.attention_models import calls_of, training
from on_nnscaler.models.call_models import packed_training
from on_nnscaler.support import autodist, jobs

pytestmark = pytest.mark.nnscaler

SEEN = [
    call_models.through_its_package,
    call_models.in_a_helper,
    call_models.of_a_partial,
    call_models.of_a_table,
]
PACKED = [call_models.packed_through_its_package, call_models.packed_in_a_helper]


@pytest.mark.parametrize("attend", [*SEEN, *PACKED])
def test_seen(two_ranks: Pool, attend: Any) -> None:
    job = (packed_training if attend in PACKED else training)(attend, plan=2)
    ranks = jobs.trained(two_ranks, job)
    for rank in ranks:
        assert len(calls_of(rank.code)) == 2
        assert all("process_group=[0, 1]" in call for call in calls_of(rank.code))


def test_a_call_by_compiled_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as raised:
        jobs.generate(training(call_models.mapped, plan=2), tmp_path, ranks=2)
    assert str(raised.value) == (
        "wrap_ring_attn_func: nnscaler traces into this call, which it does not see as an op. Have "
        "the model, or a function that it calls, make the call, not compiled code (map, "
        "functools.reduce)"
    )


@pytest.mark.parametrize("policy", ["cp", "cp_follow"])
def test_a_policy_that_finds_no_attention(tmp_path: Path, policy: str) -> None:
    config = {"pas_config": autodist.settings(tmp_path)} if policy == "cp" else {}
    job = training(call_models.no_attention, policy, plan=2, config=config)
    with pytest.raises(PartitionError) as raised:
        jobs.generate(job, tmp_path / "code", ranks=2)
    assert str(raised.value) == (
        "the policy cuts attention on its sequence, and no call of it is seen in the model\n"
        "    expected: a wrap_*_attn_func called in the model's modules or in functions that they "
        "call; calls made by compiled code (map, functools.reduce) are not seen"
    )


def test_ops_are_cut_over_all_ranks_by_cp_follow(tmp_path: Path) -> None:
    config = {"pas_config": {"max_partition_degree": 2}}
    job = training(call_models.no_attention, "cp_follow", plan=4, config=config)
    with pytest.raises(ValueError, match="cuts ops over all 4 ranks; leave out max_partition_deg"):
        jobs.generate(job, tmp_path, ranks=4)


KNOWN = """
from nnscaler.graph.parser.register import CustomizedOps
for name in ("ring_attn.wrap_ring_attn_func", "zigzag_attn.wrap_zigzag_attn_func",
             "maybe_shuffle.wrap_maybe_unshuffle"):
    assert "customized_ops.ring_attention." + name in CustomizedOps.kOpMap, name
"""
OURS, THEIRS = "import customized_ops.ring_attention", "import nnscaler"
ENGINE = "import annotations.engines.nnscaler"


@pytest.mark.parametrize(
    "imports",
    [(OURS, THEIRS), (THEIRS, OURS), (OURS, ENGINE), (ENGINE, OURS), (OURS, THEIRS, ENGINE)],
    ids=" then ".join,
)
def test_functions_are_registered_whichever_is_imported_first(imports: tuple[str, ...]) -> None:
    strict = "import warnings; warnings.simplefilter('error', RuntimeWarning)"
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([strict, *imports, KNOWN])],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
