"""Layouts of two sequences, noisy and clean, and what moves under the mask of block diffusion."""

from __future__ import annotations

import pytest

from customized_ops.ring_attention import AttnMask, Layout, Plan, make_plan


def test_tokens_of_both_sequences_are_together() -> None:
    for half in (Layout.zigzag(11, 3), Layout.from_ranges([[(4, 6), (0, 2)], [], [(2, 4)]])):
        layout = Layout.paired(half)
        assert layout.total == 2 * half.total
        for rank in range(half.group_size):
            held = half.positions(rank).tolist()
            assert layout.positions(rank).tolist() == [*held, *(half.total + n for n in held)]
        assert Layout.parse(layout.spec) == layout


def keys_of_others(plan: Plan, rank: int) -> set[int]:
    needed = plan.kv_needed[plan.kv_needed[:, 0] == rank, 1:].tolist()
    held = set(plan.k_layout.positions(rank).tolist())
    return {key for start, stop in needed for key in range(start, stop)} - held


@pytest.mark.parametrize("half", [Layout.zigzag(64, 4), Layout.striped(64, 4, 8)], ids=str)
def test_only_clean_keys_move(half: Layout) -> None:
    mask = AttnMask.block_diffusion(64, 4)
    plan = make_plan(mask, Layout.paired(half), assignment="owner")
    for rank in range(4):
        keys = keys_of_others(plan, rank)
        assert keys and min(keys) >= 64
    plan = make_plan(mask, Layout.striped(128, 4, 2), assignment="owner")  # cuts blocks
    assert any(min(keys_of_others(plan, rank)) < 64 for rank in range(4))


def test_documents_balanced_by_the_clean_copy() -> None:
    n, cu_seqlens = 4096, [0, 700, 1100, 1400, 3000, 4096]
    mask = AttnMask.block_diffusion(n, 4, cu_seqlens)
    clean = mask.restrict((n, 2 * n), (n, 2 * n)).shift(-n, -n, n, n)
    half = Layout.balanced(clean, 4)
    area = make_plan(mask, Layout.paired(half), assignment="owner").area
    alone = make_plan(clean, half, assignment="owner").area
    assert (area == 2 * alone).all() and area.max() < 1.05 * area.mean()


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("block", [1, 4, 32])
def test_no_even_pairing_moves_fewer_keys_than_zigzag(block: int, ranks: int) -> None:
    """Each rank holds m = n / P tokens of each half, which attend n / 2 keys in the mean, computes
    its own rows, and needs all clean keys up to its last token. Order ranks by their last tokens,
    falling. The K tokens after the last one of rank j + 1 are of the first j ranks. So these attend
    K (n - K / 2) keys and, with their other tokens first of all, (j m - K)^2 / 2, at the least.
    That rises with K, and for K = j m / 2 it is j m n / 2, which it must be. So the last token of
    rank j + 1 is at n - j m / 2 or later, as in zigzag order, where 3 n (P - 1) / 4 keys move."""
    n = 2048
    mask = AttnMask.block_diffusion(n, block)
    plan = make_plan(mask, Layout.paired(Layout.zigzag(n, ranks)))
    assert not plan.rows_move
    assert plan.area.max() == plan.area.min()
    keys = plan.kv_tokens()[:, 1].sum()
    assert keys == 3 * n * (ranks - 1) // 4
    for other in (Layout.zigzag(2 * n, ranks), Layout.balanced(mask, ranks)):
        moved = make_plan(mask, other, assignment="owner").kv_tokens()[:, 1].sum()
        assert keys < moved
