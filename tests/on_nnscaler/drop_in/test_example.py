"""The examples with nnscaler, and an op that a script registers for itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import annotate_an_op
import pytest
from ranks import Pool

from on_nnscaler.support import autodist, example_llama, jobs
from on_nnscaler.support.jobs import Training

pytestmark = pytest.mark.nnscaler

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("policy", ["cp", "cp_follow"])
def test_two_ranks(two_ranks: Pool, tmp_path: Path, policy: str) -> None:
    config: dict[str, Any] = {"pas_config": autodist.settings(tmp_path)} if policy == "cp" else {}
    training = Training(annotate_an_op.model, annotate_an_op.batch, policy, config=config)
    ranks = jobs.trained(two_ranks, training)
    assert ranks[0].plan is not None
    assert re.search(r"^group_norm +1 +l / 2$", ranks[0].plan, re.MULTILINE)
    for rank in ranks:
        [call] = re.findall(r"= torch\.ops\.example\.group_norm\((.*)\)", rank.code)
        assert call.endswith("group=annotations.groups.name_of_ranks((0, 1))")


@pytest.mark.parametrize("policy", ["cp_follow", "cp"])
def test_an_op_of_a_script(tmp_path: Path, policy: str) -> None:
    script = Path(__file__).parents[1] / "programs" / "own_op.py"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ours = (str(ROOT / folder) for folder in ("", "tests", "examples"))
    path = os.pathsep.join([*ours, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *launch, str(script), policy, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^centred +1 +l / 2$", done.stdout, re.MULTILINE), done.stdout


def test_llama(two_ranks: Pool, tmp_path: Path) -> None:
    arguments = ["--tokens", "64", "--steps", "3", "--generated", str(tmp_path)]
    replies = two_ranks.run(example_llama.run, arguments)
    for failed, _ in replies:
        assert failed == 0
    assert re.search(r"^wrap_ring_attn_func +2 +l / 2", replies[0][1], re.MULTILINE)
    assert "shown: the loss curve is that of one process" in replies[0][1]
