"""One document cut in two, and all others whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from benchmark.documents import document_bounds

from customized_ops.ring_attention.core.kernels import Pairs
from customized_ops.ring_attention.core.kernels.window.library_calls import lowered
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.layout.documents import cut_document as cut_document_module
from customized_ops.ring_attention.core.layout.documents.balance_documents import ENOUGH
from customized_ops.ring_attention.core.layout.documents.cut_document import cut_document
from customized_ops.ring_attention.core.layout.documents.document_areas import DocumentAreas
from customized_ops.ring_attention.core.layout.layout_tables import even_bounds
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import make_plan
from customized_ops.ring_attention.core.run.call_pairs import gathered_moves

TOKENS = 1 << 14
Range = tuple[int, int]


def cut(bounds: Any, ranks: int, **attends: Any) -> tuple[AttnMask, list[list[Range]] | None]:
    """The mask, and the ranges of each rank, if one document is cut."""
    mask = AttnMask.varlen(bounds, **attends)
    weighted = [(mask.slices, 1.0)]
    documents = DocumentAreas.of(weighted, mask.q_len)
    table = cut_document(weighted, documents, np.diff(even_bounds(mask.q_len, ranks)), ENOUGH)
    if table is None:
        return mask, None
    return mask, [[(a, b) for n, a, b in table.tolist() if n == rank] for rank in range(ranks)]


def cut_ones(tokens: int, ranks: int, seeds: int) -> Iterator[tuple[AttnMask, list[list[Range]]]]:
    """Of drawn batches those where whole documents would be uneven."""
    for seed in range(seeds):
        mask, held = cut(document_bounds(tokens, seed), ranks, causal=True)
        layout = None if held is None else Layout.from_ranges(held)
        if held is None or layout != Layout.balanced(mask, ranks):
            continue
        if make_plan(mask, layout, assignment="owner").keys_move:
            yield mask, held


@pytest.mark.parametrize(
    ("tokens", "ranks"), [(TOKENS, 2), (TOKENS - 3, 2), (3 << 13, 3), (2 * TOKENS, 4)]
)
def test_work_is_even_and_one_document_is_in_two_parts(ranks: int, tokens: int) -> None:
    found = 0
    for mask, held in cut_ones(tokens, ranks, 40):
        found, layout = found + 1, Layout.from_ranges(held)
        assert layout.sizes == Layout.contiguous(tokens, ranks).sizes
        plan = make_plan(mask, layout, assignment="owner")
        assert plan.imbalance(1, 1) <= ENOUGH
        documents = {tuple(each) for each in mask.slices[:, :2].tolist()}
        (start, cut), (after, stop) = sorted(part for each in held for part in {*each} - documents)
        assert cut == after and (start, stop) in documents and cut - start <= 0.9 * (stop - start)
        assert (cut - start) % (1 << (tokens // ranks // 16).bit_length() - 1) == 0
        # Received keys can come before the second part, if that is the first of its rank.
        assert all({*each[1:]} <= documents for each in held)
        assert sorted(plan.kv_tokens()[:, 1].tolist()) == [0] * (ranks - 1) + [cut - start]
    assert found >= 1


def test_what_moves_is_one_range_and_each_rank_makes_one_call() -> None:
    """Keys are gathered before a rank's own, which stay as they are held."""
    moved = []
    for mask, held in cut_ones(TOKENS, 2, 120):
        plan = make_plan(mask, Layout.from_ranges(held), stages=0, assignment="owner")
        moves = [gathered_moves(plan, rank) for rank in range(2)]
        assert None not in moves
        moved += moves
        for rank in range(2):
            (stage,) = plan.rank(rank).stages
            assert stage.kv is not None
            pairs = Pairs(stage.own, plan.q_layout.sizes[rank], stage.kv.tokens)
            assert len(lowered(pairs)) == 1
    assert 1 < len(set(moved)) < len(moved) / 2


def test_only_rows_that_differ_in_area_are_cut() -> None:
    """Of others each part would need all keys of the other."""
    bounds = [
        0,
        111,
        112,
        120,
        154,
        156,
        158,
        161,
        164,
        165,
        167,
        188,
        196,
        201,
        206,
        227,
        235,
        256,
    ]
    assert cut(bounds, 2, causal=True)[1] is not None
    assert cut(bounds, 2, causal=False)[1] is None


def test_long_passes_have_even_work() -> None:
    """A few per cent of theirs would be more than the host takes."""
    for seed in (0, 1, 8):
        mask, held = cut(document_bounds(4 * TOKENS, seed), 2, causal=True)
        assert held is not None
        layout = Layout.balanced(mask, 2)
        assert layout != Layout.from_ranges(held)
        assert make_plan(mask, layout, assignment="owner").imbalance(1, 1) < 1.002


@pytest.mark.parametrize(
    ("bounds", "ranks"),
    [([0, 1000], 2), ([0, 400, 800, 850, 900, 950, 1000], 3), ([0, 600, 700, 800, 900, 1000], 5)],
    ids=["one document", "two are too much", "many ranks"],
)
def test_nothing_is_tried_where_none_would_be_found(
    bounds: Any, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut_document_module, "whole_documents", None)
    assert cut(bounds, ranks, causal=True)[1] is None
