"""Hugging Face models by seqshard attention over real ranks, and under ``parallelize``."""

from __future__ import annotations

import re

import pytest
import torch
from doc_blocks import blocks
from ranks import Pool, worlds

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")

import hf_jobs

from annotations.engines.torch import Link, Rates
from tests.kernels.conformance import assert_near

from .same import same


@worlds(cpus=[2], gpus=[2, 4])
def test_cut_by_hand_on_real_ranks(ranks: Pool) -> None:
    ranks.run(hf_jobs.imported)
    for name, case in (("mistral", "packed"), ("llama", "padded left")):
        for alone, got in ranks.run(hf_jobs.cut_by_hand, name, case, "zigzag"):
            same(name, got, alone)


@worlds(cpus=[2], gpus=[])
def test_fsdp_passes_a_mask_on_as_it_is(ranks: Pool) -> None:
    """With mixed precision it copies dataclasses among the arguments of each layer."""
    ranks.run(hf_jobs.imported)
    for loss, alone, masks in ranks.run(hf_jobs.cut_under_fsdp):
        torch.testing.assert_close(loss, alone.to(loss.dtype), rtol=1e-6, atol=0)
        assert masks == 1


@pytest.mark.slow
@worlds(cpus=[4], gpus=[4])
def test_a_group_that_does_not_begin_at_rank_0(ranks: Pool) -> None:
    replies = ranks.run(hf_jobs.cut_by_hand, "mistral", "packed", "zigzag", (1, 2))
    assert [reply is None for reply in replies] == [True, False, False, True]
    for alone, got in filter(None, replies):
        same("mistral", got, alone)


@pytest.mark.parametrize(
    ("name", "case"),
    [("llama", "packed"), pytest.param("mistral", "plain", marks=pytest.mark.slow)],
)
@worlds(cpus=[2], gpus=[2])
def test_bf16(ranks: Pool, name: str, case: str) -> None:
    """Over ranks at most twice as far from fp64 as on one, by the kernel that is the fastest."""
    ranks.run(hf_jobs.imported)
    for truth, alone, got in ranks.run(hf_jobs.cut_in_bf16, name, case, "zigzag"):
        for what, want in truth.items():
            assert want.abs().max() > 1e-5, f"{what}: nothing to compare"
            assert_near(f"{name}, {what}", got[what], want, alone[what], torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "case", "policy", "rows", "lowered"),
    [
        ("llama", "plain", "cp", 3, False),
        pytest.param("llama", "plain", "cp", 3, True, marks=pytest.mark.slow),
        pytest.param("qwen3", "plain", "dp", 2, True, marks=pytest.mark.slow),
        pytest.param("mistral", "packed", "cp", 2, True, marks=pytest.mark.slow),
    ],
)
@worlds(cpus=[2], gpus=[2])
def test_parallelized(
    ranks: Pool, name: str, case: str, policy: str, rows: int, lowered: bool
) -> None:
    """The plan cuts attention and the loss, whose labels are shifted across the cut. A lowered
    Llama is in the next test, too."""
    ranks.run(hf_jobs.imported)
    given = name, case, policy, rows, None, None, lowered
    for alone, got, plan in ranks.run(hf_jobs.parallelized, *given):
        same(name, got, alone)
        split = "b" if policy == "dp" else "l"
        assert f" {split} / {ranks.size}" in plan


@pytest.mark.slow
@pytest.mark.parametrize("lengths_too", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@worlds(cpus=[2], gpus=[2])
def test_parallelized_with_documents_that_change(
    ranks: Pool, layers: int, lengths_too: bool
) -> None:
    """One graph, which puts each batch in an order of its own at the inputs, and nowhere else. It
    finds documents in position ids, or is told their lengths, which are on the host."""
    ranks.run(hf_jobs.imported)
    lengths = [(2,) * 11, (22,), (3, 9, 10), (15, 7)]
    for answers, plan, graphs in ranks.run(hf_jobs.packed_steps, lengths, layers, lengths_too):
        assert graphs == 1
        assert "layout: balanced by document over 22 tokens, permuted once at: " in plan
        assert "natural order again" not in plan
        for alone, got in answers:
            same("llama", got, alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_parallelized_with_totals_that_change(two_ranks: Pool, name: str) -> None:
    """One graph for all totals but the first. Its trace takes whole slices otherwise."""
    two_ranks.run(hf_jobs.imported)
    lengths = [(2,) * 11, (3, 9, 8), (15, 3), (24,), (1, 1, 10)]
    for answers, plan, graphs in two_ranks.run(hf_jobs.packed_steps, lengths, 2, False, name):
        assert graphs == 2 and "one graph for other sizes of input_ids, labels, pos" in plan
        for alone, got in answers:
            same(name, got, alone)


def test_parallelized_with_batches_that_are_packed_ahead(two_ranks: Pool) -> None:
    """The page's module: targets are next tokens already, and are not shifted once more."""
    two_ranks.run(hf_jobs.imported)
    (code,) = (code for code, _ in blocks("py") if "class PackedLoss" in code)
    for losses, said in two_ranks.run(hf_jobs.packed_ahead, code, [(3, 9, 10), (15, 7), (22,)]):
        for got, wanted in losses:
            assert got == pytest.approx(wanted, rel=2e-6)
        assert not said


# Slow enough that "auto" cuts a small model.
SLOW = Rates(3e7, 3e7, 1e8, (Link(0.0, 1e9),))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("policy", ["cp", "dp", "tp", "ulysses", "auto", "hybrid"])
@worlds(cpus=[2, 4], gpus=[2, 4])
def test_parallelized_by_every_policy(ranks: Pool, policy: str, name: str) -> None:
    """On all ranks in a row, and of four as 2 x 2."""
    ranks.run(hf_jobs.imported)
    shapes = [(ranks.size,)] + [(2, 2)] * (ranks.size == 4)
    for shape in shapes:
        if policy == "hybrid" and len(shape) == 1:
            continue
        given = name, "plain", policy, 4 if policy == "dp" else 3, shape, SLOW
        for alone, got, plan in ranks.run(hf_jobs.parallelized, *given):
            same("cut norms", got, alone)
            assert re.search(r" (S\d|[a-z]+ / \d)", plan), "nothing is cut"


def test_what_cannot_be_captured_is_refused(two_ranks: Pool) -> None:
    for said in two_ranks.run(hf_jobs.captured_wrongly, "padding"):
        assert "attention_mask in a captured graph is not supported" in said
