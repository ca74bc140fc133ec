"""nnscaler's planner with our ops: left to itself, told to cut the sequence, told by a file."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import dill
import pytest
import yaml
from ranks import Pool

from annotations.engines.nnscaler.sequence_policies import constraints
from on_nnscaler.models import attention_models as models
from on_nnscaler.models.attention_models import groups_of, training
from on_nnscaler.support import autodist, jobs, policies

pytestmark = pytest.mark.nnscaler

FILE = files("customized_ops.ring_attention") / "nnscaler_constraints.yaml"


def planned(tmp_path: Path, attend: Any, policy: str, **further: Any) -> jobs.Training:
    settings = autodist.settings(tmp_path, **further.pop("settings", {}))
    return training(attend, policy, plan=2, config={"pas_config": settings}, **further)


@pytest.mark.parametrize("attend", [models.ring, models.varlen, models.packed_streaming])
def test_autodist(
    two_ranks: Pool, tmp_path: Path, attend: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = jobs.trained(two_ranks, planned(tmp_path, attend, "autodist"))
    with capsys.disabled():
        print(f"\n{attend.__name__}, {ranks[0].plan}")
    names = [op for _, op, _ in autodist.chosen_plan(tmp_path) if "_attn" in op]
    assert len(names) == 2
    assert len(re.findall(r"^wrap_\w+_attn\w+ +2 +(whole|\w+ / 2)$", ranks[0].plan, re.M)) == 1


def test_a_policy_in_the_place_of_autodist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a program that asks for autodist and of which no line is to be changed."""
    monkeypatch.setenv("SEQSHARD_AUTODIST", "cp")
    for code in jobs.generate(planned(tmp_path, models.ring, "autodist"), tmp_path / "code", 2):
        assert groups_of(code) == {(0, 1)}
    monkeypatch.setenv("SEQSHARD_AUTODIST", "ring")
    with pytest.raises(ValueError, match=r"SEQSHARD_AUTODIST is 'ring'; expected one of \['cp', "):
        jobs.generate(planned(tmp_path, models.ring, "autodist"), tmp_path / "other", 2)


@pytest.mark.parametrize(
    ("attend", "n"),  # whole, l, heads, and the batch where there is one
    [(models.ring, 4), (models.varlen, 3), (models.masked, 4), (models.packed_streaming, 3)],
)
def test_all_cuts_are_timed(tmp_path: Path, attend: Any, n: int) -> None:
    """None fails: nnscaler takes 1000 s for these. The cut that communicates is filed apart."""
    jobs.generate(planned(tmp_path, attend, "autodist"), tmp_path / "code", ranks=2)
    files = list((tmp_path / "profile" / "comp").glob("customized_ops.*_attn*.json"))
    times = [time for file in files for time in json.loads(file.read_text()).values()]
    assert len(times) == n and max(time["fw_span"] for time in times) < 1000, times
    assert sum(file.name.endswith("_func.l_in_2.json") for file in files) == 1


def save_and_replicate(path: Path, graph: Any, config: Any) -> Any:
    path.write_bytes(dill.dumps(graph.dumps()))
    return policies.attention(graph, config, [("", config.plan_ngpus)])


TIME_IN_A_NEW_PROCESS = """
import dill, queue, sys
from nnscaler.autodist.cost_database import _profile_graph
from on_nnscaler.support.cpu import on_cpu

results = queue.Queue()
with on_cpu(True), open(sys.argv[1], "rb") as file:
    _profile_graph(dill.load(file), 0, 2, True, sys.argv[2], results)
for name, _, times in results.get():
    print(name, times.fw_span)
"""


def test_timing_in_a_process_of_its_own(tmp_path: Path) -> None:
    """As nnscaler does by default, one for each device."""
    (tmp_path / "comp").mkdir()
    policy = partial(save_and_replicate, tmp_path / "graph")
    jobs.generate(training(models.ring, policy, plan=2), tmp_path / "code", ranks=2)
    tests = Path(__file__).parents[2]
    folders = map(str, [tests.parent, tests, tests / "support"])  # those of conftest.py
    done = subprocess.run(
        [sys.executable, "-c", TIME_IN_A_NEW_PROCESS, tmp_path / "graph", tmp_path / "comp"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
    times = re.findall(r"^customized_ops\S*_attn_func(\S*) (\S+)$", done.stdout, re.M)
    assert [cut for cut, _ in times].count(".l_in_2") == 1 and len(times) == 4
    assert all(0 < float(time) < 1000 for _, time in times)


CP = (models.ring, models.zigzag, models.varlen, models.window, models.packed_window)


@pytest.mark.parametrize("attend", CP)
def test_cp(two_ranks: Pool, tmp_path: Path, attend: Any) -> None:
    ranks = jobs.trained(two_ranks, planned(tmp_path, attend, "cp"))
    assert [groups_of(rank.code) for rank in ranks] == 2 * [{(0, 1)}]


def test_cp_keeps_constraints_of_the_users_own(two_ranks: Pool, tmp_path: Path) -> None:
    linear = "torch.nn.functional.linear"
    path = autodist.constraints(tmp_path, {"op": linear, "allowed": [(1, 0)]})
    settings = {"partition_constraints_path": path}
    ranks = jobs.trained(two_ranks, planned(tmp_path, models.ring, "cp", settings=settings))
    assert groups_of(ranks[0].code) == {(0, 1)}
    assert {cut for _, op, cut in autodist.chosen_plan(tmp_path) if op == linear} == {(1, 0)}


def test_the_file_of_constraints(two_ranks: Pool, tmp_path: Path) -> None:
    """It serves nnscaler's own policy, which would not cut so small a model."""
    for attend, group in ((models.ring, (0, 1)), (models.zigzag, (0, 1))):
        settings = {"partition_constraints_path": str(FILE)}
        ranks = jobs.trained(two_ranks, planned(tmp_path, attend, "autodist", settings=settings))
        assert groups_of(ranks[0].code) == {group}


DENSE = (
    *(models.ring, models.zigzag, models.varlen, models.window, models.streaming, models.masked),
    models.zigzag_allgather,
)


SHUFFLING = (models.shuffled, models.shuffled_documents)


@pytest.mark.parametrize("attend", DENSE + SHUFFLING)
def test_the_file_says_what_cp_does(tmp_path: Path, attend: Any) -> None:
    found: list[dict[str, Any]] = []

    def policy(graph: Any, config: Any) -> Any:
        found.extend(constraints(graph, config.plan_ngpus))
        return policies.attention(graph, config, [("", 2)])

    jobs.generate(training(attend, policy, plan=2), tmp_path, ranks=2)
    written = {rule["name"]: rule for rule in yaml.safe_load(FILE.read_text())}
    assert len(written) == len(DENSE) + 7
    assert len(found) == len(re.findall(r"\bwrap_\w+\(", inspect.getsource(attend)))
    assert all(rule == written[rule["name"]] for rule in found)
