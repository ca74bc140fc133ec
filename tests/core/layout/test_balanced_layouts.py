"""``Layout.balanced``: even, with documents kept together, and the same in every process."""

import os
import subprocess
import sys

import numpy as np
import pytest

from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.layout.balance import (
    CHUNK_TOLERANCE,
    assign,
    chunk_work,
    crossing,
    least_maximum,
)
from customized_ops.ring_attention.core.layout.balance_swaps import Search
from customized_ops.ring_attention.core.mask import AttnMask

from .balance_cases import assert_even_counts, cuts_of, imbalance, pairs_before


def log_normal_documents(total: int, median: int, sigma: float, seed: int = 0) -> list[int]:
    """Cumulative lengths as data sets have them: many short documents and a few long ones."""
    draw = np.random.default_rng(seed)
    cu_seqlens = [0]
    while cu_seqlens[-1] < total:
        length = max(1, int(draw.lognormal(np.log(median), sigma)))
        cu_seqlens.append(min(total, cu_seqlens[-1] + length))
    return cu_seqlens


REAL = {
    "causal": AttnMask.dense(1 << 16, causal=True),
    "window": AttnMask.dense(1 << 16, causal=True, window=(2048, 0)),
    "short documents": AttnMask.varlen(log_normal_documents(1 << 16, 1000, 1.0), causal=True),
    "mixed documents": AttnMask.varlen(log_normal_documents(1 << 16, 1000, 2.0), causal=True),
    "both ways": AttnMask.varlen(log_normal_documents(60_000, 800, 1.5)),
}


@pytest.mark.parametrize("group_size", [2, 4, 7, 8])
@pytest.mark.parametrize("name", REAL)
def test_balanced_is_even(name, group_size):
    mask = REAL[name]
    chunk = mask.q_len // (16 * group_size) // 128 * 128
    layout = Layout.balanced(mask, group_size, chunk)
    assert layout.spec.split(":")[3] == str(chunk)
    rank_of = np.array(layout.spec.split(":")[4].split(","), dtype=np.int64)
    assert_even_counts(rank_of, group_size)
    areas, need = chunk_work(mask.slices, mask.q_len, chunk)
    goal = max(1 + CHUNK_TOLERANCE, least_maximum(areas, group_size) * group_size / areas.sum())
    assert imbalance(areas, rank_of, group_size) <= goal + 1e-12
    # The same, counted in tokens.
    before = pairs_before(mask, layout.pieces[:, 1:3])
    pairs = np.bincount(layout.pieces[:, 0], weights=before[:, 1] - before[:, 0])
    assert pairs.max() * group_size / mask.area <= goal + 1e-12
    tokens = np.diff(cuts_of(mask.q_len, chunk))
    like_cards = crossing(need, tokens, np.arange(len(areas)) % group_size, group_size)
    share = {"causal": 1, "window": 0.25, "short documents": 0.5}.get(name, 0.9)
    assert crossing(need, tokens, rank_of, group_size) <= share * like_cards
    if name == "window":
        assert layout == Layout.balanced(mask, group_size), "chunk is that by default"


def test_equal_documents_stay_whole():
    mask = AttnMask.varlen(range(0, 8 * 512 + 1, 512), causal=True)
    layout = Layout.balanced(mask, 4, 128)
    assert layout.sizes == (1024,) * 4
    held_by = np.empty(layout.total, dtype=np.int64)
    for rank in range(4):
        held_by[layout.positions(rank)] = rank
    assert (held_by.reshape(8, 512) == held_by[::512, None]).all()


@pytest.mark.parametrize("group_size", [2, 4, 8])
def test_a_causal_mask_is_assigned_zigzag(group_size):
    """Long runs of chunks are few kernel calls; none as even is known to move fewer keys."""
    layout = Layout.balanced(AttnMask.causal(16384), group_size)
    assert layout == Layout.zigzag(16384, group_size)


def test_interleaved_documents_are_brought_together():
    """Neither beginning has them together: gathering does it."""
    n, group_size = 32, 4
    family = np.random.default_rng(0).permutation(n) % group_size
    need = family[:, None] == family
    rank_of = assign(np.ones(n, dtype=np.int64), need, np.ones(n, dtype=np.int64), group_size)
    assert crossing(need, np.ones(n, dtype=np.int64), rank_of, group_size) == 0


def test_weighted_masks_balance_their_sum():
    full = AttnMask.dense(4096, causal=True)
    window = AttnMask.varlen([0, 3000, 3100, 4096], causal=True, window=(500, 0))
    pairs = [(full, 1), (window, 3.5)]
    layout = Layout.balanced(pairs, 4, 64)
    areas = sum(weight * chunk_work(mask.slices, 4096, 64)[0] for mask, weight in pairs)
    rank_of = np.array(layout.spec.split(":")[4].split(","), dtype=np.int64)
    assert_even_counts(rank_of, 4)
    assert imbalance(areas, rank_of, 4) <= 1 + CHUNK_TOLERANCE
    assert Layout.balanced([(full, 0.3)], 4, 64) == Layout.balanced(full, 4, 64)
    assert layout != Layout.balanced(full, 4, 64)


@pytest.mark.parametrize(("total", "group_size", "chunk"), [(100, 8, 1), (2000, 2, 62), (9, 4, 1)])
def test_default_chunk_of_short_sequences(total, group_size, chunk):
    spec = Layout.balanced(AttnMask.prefix_lm(total, total // 3), group_size).spec
    assert spec.startswith(f"chunks:{total}:{group_size}:{chunk}:")


def test_fewer_chunks_than_ranks():
    layout = Layout.balanced(AttnMask.dense(10, causal=True), 4, 5)
    assert layout.sizes == (5, 5, 0, 0)


def test_search_keeps_its_books():
    """Loads and links are updated swap by swap; they must be what a fresh count gives."""
    draw = np.random.default_rng(0)
    work, need = draw.integers(1, 100, 21), draw.random((21, 21)) < 0.3
    search = Search(work, need, np.arange(21) % 5, 5)
    for slack in (1.5, 1.2, 1.05, 1.0):
        search.gather(slack * work.sum() / 5)
        search.level(slack * work.sum() / 5)
    assert_even_counts(search.rank_of[:21], 5)
    fresh = Search(work, need, search.rank_of[:21], 5)
    assert np.array_equal(search.loads, fresh.loads)
    assert np.array_equal(search.link[:, :21], fresh.link[:, :21])
    assert np.array_equal(search.has_empty, fresh.has_empty)


def test_gathering_lowers_the_cut_and_lifts_no_load():
    draw = np.random.default_rng(1)
    n, group_size = 40, 4
    family = draw.integers(0, 6, n)
    work, need = draw.integers(50, 60, n), family[:, None] == family
    rank_of = np.arange(n) % group_size
    search = Search(work, need, rank_of, group_size)
    cap = max(search.loads.max(), 1.02 * work.sum() / group_size)
    search.gather(cap)

    def cut(rank_of):
        return (need & (rank_of[:, None] != rank_of)).sum()

    assert search.loads.max() <= cap
    assert cut(search.rank_of[:n]) < 0.7 * cut(rank_of)


SCRIPT = """
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask

mask = AttnMask.varlen({cu_seqlens}, causal=True)
print(Layout.balanced(mask, 2).spec)  # whole documents
print(Layout.balanced(mask, 6).spec)  # some of them split
print(Layout.balanced([(mask, 0.3), (AttnMask.dense(9000, window=(50, 0)), 0.7)], 6).spec)
print(Layout.balanced(mask, 8, 400).spec)
print(Layout.balanced(mask, 5, 700).spec)  # so few chunks that swaps do not do
"""


@pytest.mark.slow
def test_every_process_assigns_the_same():
    script = SCRIPT.format(cu_seqlens=log_normal_documents(9000, 300, 1.5))

    def specs(seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", script]
        return subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True
        ).stdout

    first = specs("1")
    assert (first.count("chunks:9000:"), first.count("ranges:")) == (3, 2)
    assert specs("2") == first
