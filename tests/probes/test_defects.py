"""Each defect that parallel models are known for is planted, and the probes see it and name it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import probe_models
import pytest
from probe_models import DOCUMENTS, LAYERS, TOKENS, WINDOW

from customized_ops.ring_attention import (
    AttnMask,
    Layout,
    ModelRun,
    ProbeReport,
    check_parallel_model,
    run_ranks,
)
from customized_ops.ring_attention.core.comm import Comm

CONTIGUOUS = Layout.contiguous(TOKENS, 2)
ZIGZAG = Layout.zigzag(TOKENS, 2)
EMPTY = Layout.from_sizes([14, 0, 10])
MASK = AttnMask.varlen(DOCUMENTS, causal=True, window=(WINDOW, 0))


def same(reports: Sequence[ProbeReport]) -> ProbeReport:
    """What every rank found."""
    assert len(set(map(str, reports))) == 1, "\n".join(map(str, reports))
    return reports[0]


def probed(layout: Layout, drops: str = "", parts: Sequence[str] = (), **told: Any) -> ProbeReport:
    """The report of the small model, by default of its tokens alone."""
    given: dict[str, Any] = {"documents": DOCUMENTS, "labels": None, **told}

    def rank(group: Comm) -> ProbeReport:
        alone, parallel = probe_models.models(layout, group, drops, frozenset(parts))
        return check_parallel_model(alone, parallel, probe_models.make_batch(), group, **given)

    return same(run_ranks(layout.group_size, rank))


@pytest.mark.parametrize(
    ("layout", "parts"), [(ZIGZAG, ("sink", "softcap", "shift")), (EMPTY, ()), (CONTIGUOUS, ())]
)
def test_a_sound_model_passes(layout: Layout, parts: Sequence[str]) -> None:
    mask = None if parts else MASK
    report = probed(layout, "", parts, mask=mask, layers=LAYERS, labels="labels")
    report.raise_if_failed()
    verdicts = {check.name: check.verdict for check in report.checks}
    assert [name for name in verdicts if verdicts[name] != "passed"] == ["mask"] * bool(parts)


@pytest.mark.parametrize(
    ("drops", "layout", "parts", "check", "cause"),
    [
        ("documents", CONTIGUOUS, (), "influence", "borders of documents are dropped"),
        ("group", CONTIGUOUS, (), "influence", "parallelism is off"),
        ("padded", CONTIGUOUS, (), "influence", "cu_seqlens of padded lengths"),
        ("positions", CONTIGUOUS, (), "values", "begin anew at shard borders"),
        ("positions", ZIGZAG, (), "values", "begin anew at shard borders"),
        ("layout", ZIGZAG, (), "influence", "shards of another layout"),
        ("loss scale", CONTIGUOUS, (), "gradients", "divided by the 2 ranks once too often"),
        ("strides", CONTIGUOUS, (), "influence", "strides that are not read"),
        ("scale", CONTIGUOUS, (), "values", "scale, softcap or bias is lost"),
        ("sink", CONTIGUOUS, ("sink",), "values", "sinks are lost"),
        ("empty", EMPTY, (), "loss", "a rank divides 0 by 0"),
        ("combination", CONTIGUOUS, ("softcap",), "influence", "a combination that is not"),
        ("index", CONTIGUOUS, ("shift",), "influence", "an index −1"),
    ],
)
def test_a_planted_defect_is_named(
    drops: str, layout: Layout, parts: Sequence[str], check: str, cause: str
) -> None:
    report = probed(layout, drops, parts)
    assert report[check].verdict == "failed" and cause in report[check].cause, str(report)
    others = {each.cause for each in report.failures if each.name != check}
    assert all(each.startswith("see ") for each in others if drops != "empty"), str(report)


def test_positions_that_the_batch_does_not_hold() -> None:
    """The model makes them itself, so the probes cannot try others, and see where it goes wrong."""
    report = probed(CONTIGUOUS, "positions", position_ids=None)
    assert "do not go on across shard borders" in report["values"].cause
    assert "token 12 (rank 1, document 2, first after a shard border)" in report["values"].found


def test_labels_that_are_shifted_after_the_cut() -> None:
    report = probed(CONTIGUOUS, "labels", labels="labels")
    assert "shifted after the batch is cut" in report["labels"].cause
    assert [each.cause for each in report.failures[:2]] == ["see labels"] * 2


def test_a_mask_that_the_model_alone_does_not_have() -> None:
    narrower = AttnMask.varlen(DOCUMENTS, causal=True, window=(WINDOW - 1, 0))
    report = probed(CONTIGUOUS, mask=narrower, layers=LAYERS)
    assert [each.name for each in report.failures] == ["mask"]
    assert "the model alone has another mask" in report["mask"].cause


@pytest.mark.parametrize(
    ("drops", "layout", "text"),
    [
        ("lengths", EMPTY, "holds 14 tokens, but layout"),
        ("index −1", CONTIGUOUS, "cu_seqlens"),
    ],
)
def test_what_our_ops_refuse_is_reported(drops: str, layout: Layout, text: str) -> None:
    report = probed(layout, drops)
    assert "every rank raised" in report["runs"].found and text in report["runs"].found
    assert {each.verdict for each in report.checks[1:]} == {"left out"}


def test_ranks_that_cut_by_different_lengths() -> None:
    """As code does that compares nothing: no rank holds token 12, or two do."""
    for ends, text in (
        ((12, 11), "token 11 is held 2 times, on ranks [0, 1]"),
        ((11, 12), "1 in all"),
    ):

        def rank(group: Comm, ends: tuple[int, int] = ends) -> ProbeReport:
            alone, _ = probe_models.models(CONTIGUOUS, None)

            def parallel(batch: Any) -> ModelRun:
                own = slice(0, ends[0]) if group.rank == 0 else slice(ends[1], TOKENS)
                run = alone(batch)
                where = list(range(TOKENS))[own]
                return replace(run, output=run.output[:, own], positions=where)

            return check_parallel_model(alone, parallel, probe_models.make_batch(), group)

        report = same(run_ranks(2, rank))
        assert text in report["tokens"].found and "disagree on lengths" in str(report)
        assert report["influence"].verdict == "left out"
