"""Shuffling packed documents, under nnscaler's names: against its definition, token by token."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusals
from torch import Tensor

from customized_ops.ring_attention import (
    Layout,
    run_ranks,
    wrap_maybe_shuffle,
    wrap_maybe_unshuffle,
    wrap_ring_attn_varlen_func,
)
from customized_ops.ring_attention.core.comm import Comm
from customized_ops.ring_attention.varlen_utils import shuffle_varlen, unshuffle_varlen

FEW = settings(deadline=None, derandomize=True, max_examples=30)


def held_after(lengths: Sequence[int], ranks: int, rank: int) -> list[int]:
    """nnscaler's definition: each document is cut into 2 * ranks slices as long as each other;
    a rank gets slice ``rank`` and then its mirror image, document after document."""
    tokens, start = [], 0
    for length in lengths:
        each, rest = divmod(length, 2 * ranks)
        assert rest == 0
        for number in (rank, 2 * ranks - 1 - rank):
            tokens += range(start + number * each, start + (number + 1) * each)
        start += length
    return tokens


def cumulative(lengths: Sequence[int]) -> list[int]:
    return np.cumsum([0, *lengths]).tolist()


def hidden(total: int, width: int = 3) -> Tensor:
    return torch.arange(total * width, dtype=torch.float64).view(total, width)


@st.composite
def divisible(draw: Callable[[Any], Any]) -> tuple[int, list[int]]:
    ranks = draw(st.integers(1, 6))
    slices = draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
    return ranks, [2 * ranks * n for n in slices]


CASES = [(2, [4, 8]), (4, [8, 8, 16]), (3, [0, 6, 0, 12]), (1, [2, 4]), (8, [16])]


def check_divisible(ranks: int, lengths: list[int]) -> None:
    """Values both ways, through both names, and the gradient, which is the inverse."""
    cu, total = cumulative(lengths), sum(lengths)
    before, x = Layout.contiguous(total, ranks), hidden(total)
    weight = torch.cos(x)
    want = [held_after(lengths, ranks, rank) for rank in range(ranks)]

    def of_rank(comm: Comm) -> None:
        mine = before.shard(x, comm.rank, 0).clone().requires_grad_()
        theirs = shuffle_varlen(mine, torch.tensor(cu), list(range(ranks)), comm)
        moved = wrap_maybe_shuffle(mine, torch.tensor(cu, dtype=torch.int32), process_group=comm)
        assert torch.equal(moved, x[want[comm.rank]])
        assert torch.equal(theirs, moved)
        (gradient,) = torch.autograd.grad(moved, mine, weight[want[comm.rank]])
        assert torch.equal(gradient, before.shard(weight, comm.rank, 0))
        own = moved.detach().clone().requires_grad_()
        back = wrap_maybe_unshuffle(own, cu, process_group=comm)
        assert torch.equal(back, mine)
        assert torch.equal(unshuffle_varlen(own, cu, list(range(ranks)), comm), mine)
        (gradient,) = torch.autograd.grad(back, own, before.shard(weight, comm.rank, 0))
        assert torch.equal(gradient, weight[want[comm.rank]])

    run_ranks(ranks, of_rank)


@pytest.mark.parametrize(("ranks", "lengths"), CASES)
def test_documents_that_divide(ranks: int, lengths: list[int]) -> None:
    check_divisible(ranks, lengths)


@FEW
@given(case=divisible())
def test_any_documents_that_divide(case: tuple[int, list[int]]) -> None:
    check_divisible(*case)


def test_held_after_is_the_definition() -> None:
    """Two documents of 4 and 8 tokens over two ranks, by hand."""
    assert held_after([4, 8], 2, 0) == [0, 3, 4, 5, 10, 11]
    assert held_after([4, 8], 2, 1) == [1, 2, 6, 7, 8, 9]


@FEW
@given(
    ranks=st.integers(1, 6),
    lengths=st.lists(st.integers(0, 13), min_size=1, max_size=5),
    integers=st.booleans(),
)
def test_round_trip_of_any_lengths(ranks: int, lengths: list[int], integers: bool) -> None:
    """Ranks then hold different numbers of tokens: those of the documents' zigzag layout."""
    cu, total = cumulative(lengths), sum(lengths)
    before, after = Layout.contiguous(total, ranks), Layout.zigzag(total, ranks, cu)
    x = torch.arange(total) if integers else hidden(total)

    def of_rank(comm: Comm) -> None:
        mine = before.shard(x, comm.rank, 0)
        mine = mine if integers else mine.clone().requires_grad_()
        moved = shuffle_varlen(mine, cu, list(range(ranks)), comm)
        assert moved.dtype == x.dtype
        assert torch.equal(moved, after.shard(x, comm.rank, 0))
        back = unshuffle_varlen(moved, cu, list(range(ranks)), comm)
        assert torch.equal(back, mine)
        if not integers:
            weight = torch.cos(mine.detach())
            (gradient,) = torch.autograd.grad(back, mine, weight)
            assert torch.equal(gradient, weight)

    run_ranks(ranks, of_rank)


def test_more_dims_and_any_strides() -> None:
    cu = [0, 4, 12]
    before, after = Layout.contiguous(12, 2), Layout.zigzag(12, 2, cu)
    x = hidden(12, 6).view(12, 2, 3)

    def of_rank(comm: Comm) -> None:
        mine = before.shard(x, comm.rank, 0).permute(2, 1, 0).contiguous().permute(2, 1, 0)
        moved = wrap_maybe_shuffle(mine, cu, process_group=comm)
        assert torch.equal(moved, after.shard(x, comm.rank, 0))
        assert torch.equal(wrap_maybe_unshuffle(moved, cu, process_group=comm), mine)

    run_ranks(2, of_rank)


def test_on_one_rank_and_without_a_ring_it_is_the_identity() -> None:
    x = hidden(9).requires_grad_()
    for op in (wrap_maybe_shuffle, wrap_maybe_unshuffle):
        result = op(x, [0, 2, 9])
        assert torch.equal(result, x)
        assert torch.equal(torch.autograd.grad(result.square().sum(), x)[0], 2 * x)
        assert op(x, [0, 2, 9], enable_ring=False) is x
    assert run_ranks(2, lambda comm: wrap_maybe_shuffle(x, [0, 3, 18], False, comm) is x)


@pytest.mark.parametrize("window", [(-1, -1), (3, 0)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_shuffled_model_is_the_model(ranks: int, window: tuple[int, int]) -> None:
    """shuffle -> attention in that layout -> unshuffle, values and gradients."""
    lengths = [8, 24, 0, 16]
    cu, total = cumulative(lengths), sum(lengths)
    before, layout = Layout.contiguous(total, ranks), Layout.zigzag(total, ranks, cu)
    x = torch.randn(total, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = torch.cos(x)

    def attend(q: Tensor, **where: Any) -> Any:
        k, v = q[:, ::2] * 2, q[:, 1::2] + 1
        options = {"causal": True, "window_size": window, "softcap": 3.0, **where}
        return wrap_ring_attn_varlen_func(q, k, v, cu, cu, **options)

    def of_rank(comm: Comm) -> tuple[Tensor, Tensor]:
        mine = before.shard(x, comm.rank, 0).clone().requires_grad_()
        q = wrap_maybe_shuffle(mine, cu, process_group=comm)
        out = attend(q, process_group=comm, layout=layout)
        result = wrap_maybe_unshuffle(out, cu, process_group=comm)
        gradient = torch.autograd.grad(result, mine, before.shard(weight, comm.rank, 0))[0]
        return result.detach(), gradient

    leaf = x.clone().requires_grad_()
    out = attend(leaf)
    want = out.detach(), torch.autograd.grad(out, leaf, weight)[0]
    for got, exact in zip(zip(*run_ranks(ranks, of_rank), strict=True), want, strict=True):
        torch.testing.assert_close(before.unshard(got, 0), exact, rtol=1e-10, atol=1e-10)


X = hidden(6)
ERRORS: list[tuple[Callable[[Comm], Any], str]] = [
    (
        lambda c: wrap_maybe_shuffle(X, [0, 5, 10, 12], process_group=c),
        "wrap_maybe_shuffle: laid out document by document the ranks would hold [7, 5] tokens "
        "instead of [6, 6], and their number must stay; pad each document to a multiple of 4",
    ),
    (
        lambda c: wrap_maybe_unshuffle(X, [0, 5, 10, 12], process_group=c),
        "wrap_maybe_unshuffle: laid out document by document the ranks would hold",
    ),
    (
        lambda c: wrap_maybe_shuffle(X, [0, 8], process_group=c),
        "wrap_maybe_shuffle: rank 0 of 2 holds 6 tokens, but cu_seqlens end at 8, which is 4 here",
    ),
    (
        lambda c: wrap_maybe_shuffle(X, [1, 12], process_group=c),
        "wrap_maybe_shuffle: cu_seqlens must start at 0, got [1, 12]",
    ),
    (
        lambda c: wrap_maybe_unshuffle(X, [0, 8, 4, 12], process_group=c),
        "wrap_maybe_unshuffle: cu_seqlens must not fall, but cu_seqlens[2] = 4",
    ),
    (
        lambda c: wrap_maybe_shuffle(X, [0.0, 12.0], process_group=c),
        "wrap_maybe_shuffle: cu_seqlens must be int32 or int64, got torch.float32",
    ),
    (
        lambda c: wrap_maybe_shuffle(X, torch.tensor([[0, 12]]), process_group=c),
        "wrap_maybe_shuffle: cu_seqlens must be one-dimensional",
    ),
    (
        lambda c: shuffle_varlen(X, [0, 12], [0], c),
        "shuffle_varlen: cp_ranks are [0], but cp_group has 2 ranks",
    ),
    (
        lambda c: unshuffle_varlen(X, [2, 12], [0, 1], c),
        "unshuffle_varlen: cu_seqlens_padded must start at 0, got [2, 12]",
    ),
    (
        lambda c: shuffle_varlen(X, [0, 16], [0, 1], c),
        "dim 0 of (6, 3) should be the 8 tokens that rank 0 of 2 holds",
    ),
]


@pytest.mark.parametrize(("call", "message"), ERRORS, ids=[message[:45] for _, message in ERRORS])
def test_errors(call: Callable[[Comm], Any], message: str) -> None:
    first, second = refusals(2, call)
    assert message in first
    assert re.sub(r"rank \d", "rank r", first) == re.sub(r"rank \d", "rank r", second)


def test_cu_seqlens_that_do_not_end_at_the_tokens_of_one_rank() -> None:
    with pytest.raises(
        ValueError, match="wrap_maybe_shuffle: cu_seqlens ends at 8 but there are 6"
    ):
        wrap_maybe_shuffle(X, [0, 8])


@pytest.mark.parametrize("op", [wrap_maybe_shuffle, wrap_maybe_unshuffle])
def test_a_wrong_call_on_one_rank_stops_all(op: Any) -> None:
    first, second = refusals(2, lambda comm: op(X[: 6 - comm.rank], [0, 12], process_group=comm))
    assert second.startswith(f"{op.__name__}: rank 1 of 2 holds 5 tokens")
    assert f"refused on another rank of the group\nrank 1: {second}" in first
