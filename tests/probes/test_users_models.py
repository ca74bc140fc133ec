"""Probes of models as users shard them: by hand, by the engine, by Hugging Face; over processes,
where a rank fails, and with arguments that do not fit."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

import probe_jobs
import probe_models
import pytest
import torch
from doc_blocks import blocks
from ranks import Pool
from torch import Tensor

from customized_ops.ring_attention import (
    AttnMask,
    Layout,
    ModelRun,
    ProbeError,
    ProbeReport,
    check_parallel_model,
    run_ranks,
)
from customized_ops.ring_attention.core.comm import Comm
from customized_ops.ring_attention.op.arguments import ArgumentError


def same(texts: Sequence[str]) -> str:
    """What all ranks say."""
    assert len(set(texts)) == 1, texts
    return texts[0]


def test_by_hand_over_processes(two_ranks: Pool) -> None:
    sound = same(two_ranks.run(probe_jobs.by_hand))
    assert sound.startswith("parallel model: passed\n")
    wrong = same(two_ranks.run(probe_jobs.by_hand, "group"))
    assert "FAILED" in wrong and "parallelism is off" in wrong


def test_under_torchrun_as_the_page_has_it(two_ranks: Pool) -> None:
    ((first, _),) = [each for each in blocks("python") if "def probe(group, told)" in each[0]]
    ((script, _),) = [each for each in blocks("py") if "timeout=timedelta(" in each[0]]
    said = two_ranks.run(probe_jobs.as_the_page_has_it, first.partition("sound = ")[0] + script)
    assert said[0].startswith("parallel model: passed\n") and not said[1], said


def test_by_the_engine(two_ranks: Pool) -> None:
    sound = same(two_ranks.run(probe_jobs.parallelized, "cp"))
    assert sound.startswith("parallel model: passed\n"), sound
    assert "every rank has the output of all" in sound
    wrong = same(two_ranks.run(probe_jobs.parallelized, "cp", True))
    assert "gradients are not added up over the ranks" in wrong, wrong


def test_under_fsdp(two_ranks: Pool) -> None:
    sound = same(two_ranks.run(probe_jobs.under_fsdp, 1.0))
    assert sound.startswith("parallel model: passed\n"), sound
    wrong = same(two_ranks.run(probe_jobs.under_fsdp, 2.0))
    assert "gradients are added up over 2 ranks" in wrong, wrong


def test_a_rank_that_fails_is_heard_of_on_all(two_ranks: Pool) -> None:
    reports, heard = zip(*two_ranks.run(probe_jobs.one_fails, 1), strict=True)
    said = same(reports)
    what = r"in may_fail \(probe_jobs.py, line \d+\): RuntimeError: out of something"
    stopped = r"; ranks \[0\] waited for peers, and stopped\n"
    assert re.search(rf"1 of 2 ranks raised: rank 1, {what}{stopped}", said), said
    ((told,), none) = heard
    assert re.search(rf"rank 1 failed in a step of check_parallel_model, {what}$", told), told
    assert not none


@pytest.mark.slow
def test_a_rank_that_fails_says_so_before_it_waits(two_ranks: Pool) -> None:
    """Its peer is in a collective of torch's, and does not hear of it until that times out."""
    reports, warned = zip(*two_ranks.run(probe_jobs.one_fails_before_a_collective), strict=True)
    what = r"rank 1, in summed \(probe_jobs.py, line \d+\): RuntimeError: out of something"
    assert re.search(rf"every rank raised: rank 0, in summed .*; {what}", same(reports)), reports
    at_once, waits = warned[1]
    assert re.fullmatch(rf"check_parallel_model: {what}", at_once), at_once
    waited = r"rank 1 of the group of ranks \[0, 1\] has waited 3 s: rank 0 has not come"
    assert re.fullmatch(rf"check_parallel_model, after {what}: {waited}", waits), waits


def test_where_all_ranks_fail_one_of_them_warns(two_ranks: Pool) -> None:
    for _ in range(2):  # also in the next check
        reports, warned = zip(*two_ranks.run(probe_jobs.every_rank_fails), strict=True)
        assert same(reports).count("RuntimeError: out of something") == 2, reports
        (told,) = [each for of_rank in warned for each in of_rank]
        assert told.startswith("check_parallel_model: rank "), told


def test_in_process_too() -> None:
    def rank(group: Comm) -> ProbeReport:
        alone, parallel = probe_models.models(Layout.contiguous(24, 2), group)

        def failing(batch: Mapping[str, Tensor]) -> ModelRun:
            if group.rank == 0:
                raise KeyError("no such weight")
            return parallel(batch)

        return check_parallel_model(alone, failing, probe_models.make_batch(), group)

    with pytest.warns(UserWarning, match="rank 0, in failing .*: KeyError: 'no such") as told:
        reports = run_ranks(2, rank)
    assert len(told) == 1, "rank 1 only waited"
    said = same([str(report) for report in reports])
    assert "1 of 2 ranks raised: rank 0, in failing (test_users_models.py, line " in said
    assert "): KeyError: 'no such weight'; ranks [1] waited for peers, and stopped" in said
    with pytest.raises(ProbeError, match="no such weight"):
        reports[1].raise_if_failed()


def test_batches_that_differ(two_ranks: Pool) -> None:
    said = same(two_ranks.run(probe_jobs.different_batches))
    assert "DisagreementError: check_parallel_model" in said and "batch['input_ids']" in said


@pytest.mark.filterwarnings("ignore:check_parallel_model")  # of each rank's error
@pytest.mark.parametrize("drops", ["", "labels", "attention"])
def test_hugging_face(drops: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: '.[hf]'")
    import hf_models

    from customized_ops.ring_attention.api import transformers as seqshard

    model = hf_models.tiny("mistral", layers=1)  # it has a window
    batch = hf_models.batch("plain")
    batch["labels"] = batch["input_ids"]
    batch["position_ids"] = torch.arange(hf_models.TOKENS).expand(hf_models.ROWS, -1).clone()

    def rank(group: Comm) -> ProbeReport:
        own, whole = copy.deepcopy(model), copy.deepcopy(model)
        own.set_attn_implementation("seqshard")
        whole.set_attn_implementation("sdpa")

        def alone(batch: Mapping[str, Tensor]) -> ModelRun:
            out = whole(**batch, use_cache=False)
            out.loss.backward()
            return ModelRun(out.loss.detach(), out.logits, gradients=whole)

        def parallel(batch: Mapping[str, Tensor]) -> ModelRun:
            shard = seqshard.shard_batch(batch, group)
            inputs: dict[str, Any] = dict(shard.inputs)
            if drops == "labels":  # of the rank's own tokens
                del inputs["shift_labels"]
            if drops == "attention":  # alone, as if there were no group
                own.set_attn_implementation("sdpa")
            with shard.context():
                out = own(**inputs)
            out.loss.backward()
            seqshard.sum_gradients(own, group)
            loss = seqshard.sum_over_ranks(out.loss, group)
            where = shard.layout.positions(group.rank)
            return ModelRun(loss, out.logits, where, own)

        # Norms, angles and the loss are fp32.
        told: dict[str, Any] = {"tolerance": 1e-5, "places": [0, 6, 18]}
        return check_parallel_model(alone, parallel, batch, group, **told)

    (report, other) = run_ranks(2, rank)
    assert str(report) == str(other)
    failed = {check.name: check.cause for check in report.failures}
    if drops == "labels":
        assert "shifted after the batch is cut" in failed["labels"], str(report)
        assert failed["loss"] == failed["gradients"] == "see labels"
    elif drops == "attention":
        assert "no attention ran over the ranks" in report["runs"].found, str(report)
        assert report["runs"].found.count(", in parallel (test_users_models.py, line ") == 2
    else:
        report.raise_if_failed()
        assert {check.name for check in report.checks if check.verdict == "left out"} == {"mask"}


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ({"tokens": "ids"}, "tokens must be one of"),
        ({"documents": [0, 9]}, r"documents must be lengths added up, from 0 to 24, got \[0, 9\]"),
        ({"mask": AttnMask.causal(9)}, r"mask must be of 24 tokens, got \(9, 9\)"),
        ({"places": [24]}, "places must be tokens from 0 to 23, got 24"),
        ({"places": [-1]}, "places must be tokens from 0 to 23, got -1"),
        ({"layers": 0}, "layers must be a number of layers, 1 or more, got 0"),
        ({"tokens": "one"}, "two different tokens"),
        ({"labels": "short"}, r"batch\['short'\] must be of 1 rows of 24 tokens, got \(1, 9\)"),
        ({"labels": "list"}, r"batch\['list'\] must be a tensor, got \[1"),
        ({"documents": 9}, "documents must be a list of integers, or None, got 9"),
        ({"mask": "causal"}, "mask must be an AttnMask, or None, got 'causal'"),
        ({"tolerance": 0.0}, "tolerance must be above 0, or None, got 0.0"),
    ],
)
def test_arguments_that_do_not_fit(told: dict[str, Any], text: str) -> None:
    """They raise on all ranks, also where one rank alone has them."""
    batch = {**probe_models.make_batch(), "one": torch.zeros(1, 24, dtype=torch.int64)}
    batch |= {"short": torch.ones(1, 9, dtype=torch.int64), "list": [1] * 24}  # type: ignore[dict-item]
    errors = []

    def rank(group: Comm) -> None:
        alone, parallel = probe_models.models(Layout.contiguous(24, 2), group)
        with pytest.raises(ValueError, match=text) as caught:
            check_parallel_model(alone, parallel, batch, group, **(told if group.rank else {}))
        errors.append(caught.type)

    run_ranks(2, rank)
    assert {error.__name__ for error in errors} == {ArgumentError.__name__, "DisagreementError"}


@pytest.mark.filterwarnings("ignore:check_parallel_model")  # of each rank's error
def test_a_run_that_is_none_is_reported() -> None:
    def rank(group: Comm) -> str:
        alone, _ = probe_models.models(Layout.contiguous(24, 2), group)
        batch = probe_models.make_batch()
        return str(check_parallel_model(alone, lambda given: None, batch, group))  # type: ignore[arg-type,return-value]

    assert "parallel must return a ModelRun, got NoneType" in same(run_ranks(2, rank))
