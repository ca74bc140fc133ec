"""Each defect that parallel models are known for is planted, and the probes see it and name it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import probe_models
import pytest
import torch
import torch.nn.functional as F
from probe_models import DOCUMENTS, LAYERS, TOKENS, WINDOW
from torch import Tensor

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
UNEVEN = Layout.from_sizes([14, 10])
NARROW = Layout.from_sizes([11, 3, 10])  # the last row of rank 1 sees a token of rank 0
EMPTY = Layout.from_sizes([14, 0, 10])
MASK = AttnMask.varlen(DOCUMENTS, causal=True, window=(WINDOW, 0))


def same(reports: Sequence[ProbeReport]) -> ProbeReport:
    """What every rank found."""
    assert len(set(map(str, reports))) == 1, "\n".join(map(str, reports))
    return reports[0]


def probed(
    layout: Layout,
    drops: str = "",
    parts: Sequence[str] = (),
    dtype: torch.dtype = torch.float64,
    **told: Any,
) -> ProbeReport:
    """The report of the small model, by default of its tokens alone."""
    given: dict[str, Any] = {"documents": DOCUMENTS, "labels": None, **told}

    def rank(group: Comm) -> ProbeReport:
        alone, parallel = probe_models.models(layout, group, drops, frozenset(parts), dtype)
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
        ("softcap", CONTIGUOUS, ("softcap",), "values", "scale, softcap or bias is lost"),
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_no_defect(dtype: torch.dtype) -> None:
    probed(ZIGZAG, dtype=dtype).raise_if_failed()
    report = probed(CONTIGUOUS, "group", dtype=dtype)
    assert "parallelism is off" in report["influence"].cause, str(report)


def test_positions_that_the_batch_does_not_hold() -> None:
    """The model makes them itself, so the probes cannot try others, and see where it goes wrong."""
    report = probed(CONTIGUOUS, "positions", position_ids=None)
    assert "do not go on across shard borders" in report["values"].cause
    assert "token 12 (rank 1, document 2, first after a shard border)" in report["values"].found


@pytest.mark.parametrize(
    ("drops", "layout"),
    [("labels", CONTIGUOUS), ("rolled labels", CONTIGUOUS), ("rolled labels", ZIGZAG)],
)
def test_labels_that_are_shifted_after_the_cut(drops: str, layout: Layout) -> None:
    """Those at borders are lost, or are of the rank's first token."""
    report = probed(layout, drops, labels="labels")
    assert report["labels"].cause.startswith("labels at shard borders"), str(report)
    assert "first after a shard border" in report["labels"].found
    assert [each.cause for each in report.failures[:2]] == ["see labels"] * 2
    untold = probed(layout, drops, labels=None)
    assert "or labels are shifted after the batch is cut" in untold["loss"].cause, str(untold)


@pytest.mark.parametrize("drops", ["positions", "group"])
def test_labels_that_are_right_where_values_are_wrong(drops: str) -> None:
    """Of those tried one at a border alone counts otherwise: the row before it is wrong."""
    places = [5, NARROW.sizes[0] + NARROW.sizes[1], 20]
    report = probed(NARROW, drops, labels="labels", places=places)
    assert "where the label at token 14 (rank 2" in report["labels"].found
    causes = {each.name: each.cause for each in report.failures}
    of_loss = [causes[name] for name in ("loss", "gradients", "labels")]
    assert of_loss == ["see values"] * 3, str(report)


@pytest.mark.parametrize("layout", [CONTIGUOUS, ZIGZAG])
def test_labels_that_are_not_those_of_the_batch(layout: Layout) -> None:
    """Nothing is averaged; a loss that does not depend on the labels says nothing of that."""
    report = probed(layout, "labels of tokens", labels="labels")
    causes = {each.name: each.cause for each in report.failures}
    assert "does not depend on the batch's labels" in causes.pop("labels"), str(report)
    assert causes == {"loss": "see labels", "gradients": "see labels"}


def test_means_of_different_numbers_of_labels() -> None:
    """They weigh all labels of a rank otherwise, not those at borders."""
    report = probed(UNEVEN, "empty", labels="labels")
    assert report["loss"].cause.startswith("the loss is of ranks with different numbers of labels")
    assert "borders" not in report["loss"].cause and report["labels"].cause == "see loss"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_loss_divided_by_another_count(dtype: torch.dtype) -> None:
    """Labels count otherwise too, as long as that is more than is allowed."""
    report = probed(UNEVEN, "count", labels="labels", dtype=dtype)
    causes = {each.name: each.cause for each in report.failures}
    of_labels = causes.pop("labels", "see loss")
    told = "loss scale: the loss and all gradients are 1.0006 times those of one process"
    assert set(causes) == {"loss", "gradients"} and of_labels == "see loss", str(report)
    assert all(each.startswith(told) for each in causes.values()), str(report)


def test_a_mask_that_the_model_alone_does_not_have() -> None:
    narrower = AttnMask.varlen(DOCUMENTS, causal=True, window=(WINDOW - 1, 0))
    report = probed(CONTIGUOUS, mask=narrower, layers=LAYERS)
    assert [each.name for each in report.failures] == ["mask"]
    assert "the model alone has another mask" in report["mask"].cause


@pytest.mark.filterwarnings("ignore:check_parallel_model")  # of each rank's error
@pytest.mark.parametrize(
    ("drops", "layout", "text"),
    [
        ("lengths", EMPTY, "holds 14 tokens, but layout"),
        ("index −1", CONTIGUOUS, "cu_seqlens"),
        ("unsupported", CONTIGUOUS, "return_attn_probs=True is not supported yet"),
    ],
)
def test_what_our_ops_refuse_is_reported(drops: str, layout: Layout, text: str) -> None:
    report = probed(layout, drops)
    assert "every rank raised" in report["runs"].found and text in report["runs"].found
    assert {each.verdict for each in report.checks[1:]} == {"left out"}


Change = Callable[[ModelRun, int], ModelRun]


def of_other_code(change: Change, rows: int = 1) -> ProbeReport:
    """The report of a model that is the one alone, but for what is changed on each of two ranks:
    code that compares nothing. Its loss has no labels."""

    def rank(group: Comm) -> ProbeReport:
        ids = probe_models.make_batch()["input_ids"].view(rows, -1)
        batch = {"input_ids": ids, "labels": ids}
        table = torch.linspace(1, 2, probe_models.VOCAB, dtype=torch.float64)[:, None]

        def alone(batch: Mapping[str, Tensor]) -> ModelRun:
            x = table[batch["input_ids"]].cumsum(1)
            return ModelRun(x.mean(), x)

        return check_parallel_model(
            alone, lambda given: change(alone(given), group.rank), batch, group
        )

    return same(run_ranks(2, rank))


def cut(run: ModelRun, rank: int, first_ends: int, second_begins: int) -> ModelRun:
    """A part of what the model alone has."""
    where = range(first_ends) if rank == 0 else range(second_begins, TOKENS)
    return replace(run, output=run.output[:, list(where)], positions=list(where))


def test_ranks_that_cut_by_different_lengths() -> None:
    twice = of_other_code(lambda run, rank: cut(run, rank, 12, 11))
    assert "token 11 is held 2 times, on ranks [0, 1]" in twice["tokens"].found
    never = of_other_code(lambda run, rank: cut(run, rank, 11, 12))
    assert "token 11, and 1 in all, are on no rank" in never["tokens"].found
    for report in (twice, never):
        assert report["tokens"].cause == "ranks disagree on lengths or on the layout"
        assert report["influence"].verdict == "left out"
    beyond = of_other_code(lambda run, rank: replace(run, positions=[*range(1, TOKENS + 1)]))
    assert "rank 0 says position 24 of 24 tokens" in beyond["tokens"].found


def padded(run: ModelRun, rank: int) -> ModelRun:
    """With two tokens more, that belong to no position."""
    part = cut(run, rank, 12, 12)
    output = F.pad(part.output, (0, 0, 1, 1), value=7.0)
    return replace(part, output=output, positions=[-1, *part.positions, -1])  # type: ignore[misc]


def test_padding_belongs_to_no_token() -> None:
    report = of_other_code(padded)
    report.raise_if_failed()
    assert report["tokens"].found == "each of 24 on one rank; ranks have [12, 12]"
    assert report["labels"].verdict == "left out"


def test_rows_that_are_mixed() -> None:
    report = of_other_code(lambda run, rank: replace(run, output=run.output.flip(0)), rows=2)
    assert report["influence"].cause.startswith("rows of the batch are mixed")


def test_outputs_that_are_no_numbers() -> None:
    report = of_other_code(lambda run, rank: replace(run, output=run.output / rank))
    assert report["runs"].found == "outputs of rank 0 are not all numbers; alone they are"


@pytest.mark.filterwarnings("ignore:check_parallel_model")  # of each rank's error
def test_tokens_that_differ_from_run_to_run() -> None:
    """As where a layout follows from what the tokens are."""
    ends = itertools.chain([12, 12], itertools.repeat(10))  # of both ranks, in the first run
    report = of_other_code(lambda run, rank: cut(run, rank, *[next(ends)] * 2))
    assert "parallel must have the same tokens in each run" in report["runs"].found
