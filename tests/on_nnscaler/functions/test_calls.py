"""What becomes of calls as people write them, and what is pinned."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Pool

import customized_ops.ring_attention
from annotations import parallelize
from annotations.engines.nnscaler import OpNode
from annotations.engines.nnscaler.sequence_policies import constraints
from annotations.errors import PartitionError
from on_nnscaler.models import attention_models as models
from on_nnscaler.models.attention_models import (
    both_kinds,
    calls_of,
    listed_lengths,
    longest,
    numpy_scale,
    training,
    unsupported,
    window_of_a_shape,
)
from on_nnscaler.models.call_models import packed_training, short_batch, with_both
from on_nnscaler.support import autodist, jobs, policies
from on_nnscaler.support.cpu import on_cpu

pytestmark = pytest.mark.nnscaler


@pytest.mark.parametrize("attend", [numpy_scale, window_of_a_shape])
def test_numbers(two_ranks: Pool, attend: Any) -> None:
    jobs.trained(two_ranks, training(attend, plan=2))


@pytest.mark.parametrize("attend", [listed_lengths, longest])
def test_lengths(two_ranks: Pool, attend: Any) -> None:
    job = packed_training(attend, plan=2)
    if attend is listed_lengths:
        job = jobs.Training(job.model, short_batch, "cp_follow", plan=2)
    jobs.trained(two_ranks, job)


@pytest.mark.parametrize("attend", [window_of_a_shape, longest])
def test_they_are_timed(tmp_path: Path, attend: Any) -> None:
    """nnscaler notes 1000 s for what cannot be."""
    config = {"pas_config": autodist.settings(tmp_path)}
    job = packed_training if attend is longest else training
    jobs.generate(job(attend, "cp", plan=2, config=config), tmp_path / "code", ranks=2)
    files = (tmp_path / "profile" / "comp").glob("customized_ops*.json")
    noted = {
        f"{file.stem} {shapes}": times["fw_span"]
        for file in files
        for shapes, times in json.loads(file.read_text()).items()
    }
    assert len(noted) >= 2
    assert [call for call, milliseconds in noted.items() if milliseconds >= 1e6] == []


def test_mistakes_are_found_while_tracing(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="return_attn_probs=True is not supported yet"):
        jobs.generate(training(unsupported, plan=2), tmp_path, ranks=2)


def test_a_length_that_does_not_divide(tmp_path: Path) -> None:
    with pytest.raises(PartitionError) as raised:
        jobs.generate(training(models.ring, plan=3), tmp_path, ranks=3)
    assert str(raised.value) == (
        "wrap_ring_attn_func: a call in layers.0 cannot be cut on 'l' over 3 ranks: 'l' = 16, and "
        "nnscaler cuts into equal parts\n    expected: a multiple of 3; pad the sequence"
    )


def test_a_length_that_does_not_divide_under_autodist(tmp_path: Path) -> None:
    """The same error, whether the constraints are the policy's or the user's own."""
    own = Path(customized_ops.ring_attention.__file__).parent / "nnscaler_constraints.yaml"
    for policy, further in (("cp", {}), ("autodist", {"partition_constraints_path": str(own)})):
        settings = {"pas_config": autodist.settings(tmp_path, **further)}
        job = training(models.ring, policy, plan=3, config=settings)
        with pytest.raises(PartitionError) as raised:
            jobs.generate(job, tmp_path / policy, ranks=3)
        assert str(raised.value).startswith(
            "wrap_ring_attn_func: a call in layers.0 cannot be cut on 'l' over 3 ranks: 'l' = 16, "
        )


SEQUENCE = {"allowed": [(0, 1)]}
ELSEWHERE = {"module": "Elsewhere", "allowed": [(0, 2)]}
FITS_NOT = "cannot be cut on 'l' over 3 ranks: 'l' = 16, and nnscaler cuts into equal parts"


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([{"module": "Attention", **SEQUENCE}], FITS_NOT),
        ([{"module": "Attent", **SEQUENCE}, ELSEWHERE], FITS_NOT),
        ([{"module": "Attention", "allowed": []}], "allowed_partition_dims are []"),
        ([{"allowed": []}], "allowed_partition_dims are []"),
        ([{"allowed": [(7, 7)]}], "allowed_partition_dims are ['7,7']"),
    ],
)
def test_constraints_that_leave_no_way(
    tmp_path: Path, rules: list[dict[str, Any]], said: str
) -> None:
    """Of those of a part of the model, and of those that allow nothing at all."""
    name = "customized_ops.ring_attention.ring_attn.wrap_ring_attn_func"
    path = Path(autodist.constraints(tmp_path, *({"op": name, **rule} for rule in rules)))
    path.write_text(path.read_text().replace("replica_allowed: true", "replica_allowed: false"))
    settings = autodist.settings(tmp_path, partition_constraints_path=str(path))
    job = training(models.ring, "autodist", plan=3, config={"pas_config": settings})
    with pytest.raises(PartitionError) as raised:
        jobs.generate(job, tmp_path / "code", ranks=3)
    assert str(raised.value).startswith("wrap_ring_attn_func: a call in layers.0 cannot be cut")
    assert said in str(raised.value) and "expected: " in str(raised.value)


def test_constraints_cannot_tell_packed_calls(tmp_path: Path) -> None:
    def policy(graph: Any, config: Any) -> Any:
        constraints(graph, config.plan_ngpus)

    with pytest.raises(PartitionError) as raised:
        jobs.generate(training(both_kinds, policy, plan=2), tmp_path, ranks=2)
    assert str(raised.value) == (
        "wrap_sliding_window_attn_func: some calls are of packed documents and some are not, and "
        "autodist's constraints cannot tell them apart\n"
        "    expected: one kind of call of it, or the policy 'cp_follow'"
    )


@pytest.mark.parametrize(("text", "fits"), [("# nothing yet\n", True), ("name: x\n", False)])
def test_constraints_of_the_users_own(tmp_path: Path, text: str, fits: bool) -> None:
    (tmp_path / "own.yaml").write_text(text)
    settings = autodist.settings(tmp_path, partition_constraints_path=str(tmp_path / "own.yaml"))
    job = training(models.ring, "cp", plan=2, config={"pas_config": settings})
    if fits:
        assert len(jobs.generate(job, tmp_path / "code", ranks=2)) == 2
    else:
        with pytest.raises(ValueError, match=r"own.yaml must hold a list, got {'name': 'x'}"):
            jobs.generate(job, tmp_path / "code", ranks=2)


@pytest.mark.parametrize("reuse", ["graph", "moo"])
def test_a_kept_graph_is_annotated_for_the_ranks_at_hand(tmp_path: Path, reuse: str) -> None:
    """Two key heads are cut with their query heads over 2 ranks; over 4 the latter are, alone."""

    def generate(plan: int, cuts: Any, reuse: str) -> str:
        policy = partial(policies.attention, cuts=cuts)
        job = training(models.ring, policy, plan=plan)
        with on_cpu():
            config = job.compute_config(plan, torch.device("cpu"))
            parallelize(
                job.model(), job.batch(0), policy, config, engine="nnscaler",
                load_module=False, gen_savedir=tmp_path, reuse=reuse,
            )  # fmt: skip
        return next(tmp_path.rglob("gencode1.py")).read_text()

    assert "q_heads" not in calls_of(generate(2, [("g", 2)], "override"))[0]
    assert "q_heads=(1, 4)" in calls_of(generate(4, [("qh", 4)], reuse))[0]


@pytest.mark.parametrize("policy", ["cp", "cp_follow"])
def test_only_attention_is_pinned(two_ranks: Pool, tmp_path: Path, policy: str) -> None:
    config = {"pas_config": autodist.settings(tmp_path)} if policy == "cp" else {}
    job = jobs.Training(with_both, models.batch, policy, plan=2, config=config)
    ranks = jobs.trained(two_ranks, job)
    rows = {line.split("  ")[0]: line.split("  ")[-1] for line in str(ranks[0].plan).split("\n")}
    assert rows["wrap_ring_attn_func"] == "l / 2"
    if policy == "cp_follow":
        assert rows["checked_losses"] == "l / 2"


def test_pinned_are_sequences_alone(tmp_path: Path) -> None:
    seen: list[Any] = []

    def policy(graph: Any, config: Any) -> Any:
        seen.extend(rule["name"].rpartition(".")[2] for rule in constraints(graph, 2))
        assert len(graph.select(ntype=OpNode)) == 2
        return policies.sequence_by_graph(graph, config)

    job = jobs.Training(with_both, models.batch, policy, plan=2)
    jobs.generate(job, tmp_path, ranks=2)
    assert seen == ["wrap_ring_attn_func"]
