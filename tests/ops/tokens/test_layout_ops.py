"""Shuffle, unshuffle, shard, unshard and roll on in-process ranks, against plain indexing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from annotations.consistency import DisagreementError
from customized_ops.ring_attention import (
    AttnMask,
    Layout,
    run_ranks,
    wrap_maybe_shuffle,
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
    wrap_roll_func,
    wrap_shard_func,
    wrap_shuffle_func,
    wrap_unshard_func,
    wrap_unshuffle_func,
)
from customized_ops.ring_attention.core.comm import Comm
from customized_ops.ring_attention.maybe_shuffle import shuffle_documents
from customized_ops.ring_attention.op.arguments import ArgumentError
from customized_ops.ring_attention.op.tokens.order_ops import move_tokens

LAYOUTS = {
    "contiguous": Layout.contiguous(16, 4),
    "contiguous, uneven": Layout.contiguous(13, 4),
    "zigzag": Layout.zigzag(16, 4),
    "zigzag, uneven": Layout.zigzag(13, 4),
    "zigzag of documents": Layout.zigzag(21, 3, [0, 5, 5, 6, 21]),
    "striped": Layout.striped(16, 4),
    "striped by 3": Layout.striped(14, 3, 3),
    "balanced": Layout.balanced(AttnMask.prefix_lm(24, 7), 4, 2),
    "sizes": Layout.from_sizes([0, 9, 1, 0]),
    "ranges": Layout.from_ranges([[(7, 9), (0, 2)], [], [(9, 10), (2, 7)]]),
    "more ranks than tokens": Layout.striped(3, 8),
    "one rank": Layout.zigzag(6, 1),
    "no tokens": Layout.contiguous(0, 3),
}
TRIP = pytest.mark.parametrize("name", LAYOUTS)


def whole(layout: Layout, dim: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """[2, 3, 4] with ``dim`` as long as the layout, every element another."""
    shape = [2, 3, 4]
    shape[dim] = layout.total
    return torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)


def plain(layout: Layout) -> Layout:
    return Layout.contiguous(layout.total, layout.group_size)


def strided(x: Tensor) -> Tensor:
    """The same values with gaps in memory and its dims in another order."""
    wide = torch.stack([x, torch.full_like(x, -1)], dim=-1).permute(3, 2, 1, 0).contiguous()
    return wide.permute(3, 2, 1, 0)[..., 0]


def on_ranks(layout: Layout, function: Callable[[Comm], Tensor]) -> list[Tensor]:
    return run_ranks(layout.group_size, function)


def grad(result: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    assert result.requires_grad and result.shape == weight.shape
    return result.detach(), torch.autograd.grad(result, x, weight)[0]


def same(got: list[Tensor], want: list[Tensor]) -> None:
    """Bit for bit, and owned: neither a view nor strided."""
    for rank, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype and torch.equal(a, b), f"rank {rank}: {a}, want {b}"
        assert a.is_contiguous()


@pytest.mark.covering(1)
@TRIP
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_shuffle_and_back(name: str, dim: int) -> None:
    """The gradient of a shuffle is the unshuffle of the gradient."""
    layout = LAYOUTS[name]
    before, x = plain(layout), whole(layout, dim)
    weight = torch.cos(x)

    def there(comm: Comm) -> tuple[Tensor, Tensor]:
        mine = strided(before.shard(x, comm.rank, dim)).requires_grad_()
        moved = wrap_shuffle_func(mine, layout, comm, dim)
        return grad(moved, mine, layout.shard(weight, comm.rank, dim))

    def back(comm: Comm) -> tuple[Tensor, Tensor]:
        mine = strided(layout.shard(x, comm.rank, dim)).requires_grad_()
        moved = wrap_unshuffle_func(mine, layout, comm, dim)
        return grad(moved, mine, before.shard(weight, comm.rank, dim))

    def shards(of: Layout, t: Tensor) -> list[Tensor]:
        return [of.shard(t, rank, dim).contiguous() for rank in range(of.group_size)]

    for function, source, target in ((there, before, layout), (back, layout, before)):
        moved, gradients = zip(*on_ranks(layout, function), strict=True)
        same(moved, shards(target, x))
        same(gradients, shards(source, weight))


@pytest.mark.covering(1)
@TRIP
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_shard_and_unshard(name: str, dim: int) -> None:
    layout, x = LAYOUTS[name], whole(LAYOUTS[name], dim)
    ranks = range(layout.group_size)
    weight = torch.cos(x)

    def shard(comm: Comm) -> tuple[Tensor, Tensor]:
        own = strided(x.clone()).requires_grad_()
        result = wrap_shard_func(own, layout, comm, dim)
        return grad(result, own, layout.shard(weight, comm.rank, dim))

    def unshard(comm: Comm) -> tuple[Tensor, Tensor]:
        mine = strided(layout.shard(x, comm.rank, dim)).requires_grad_()
        result = wrap_unshard_func(mine, layout, comm, dim)
        return grad(result, mine, weight * (1 + comm.rank))

    parts, gradients = zip(*on_ranks(layout, shard), strict=True)
    same(parts, [layout.shard(x, rank, dim).contiguous() for rank in ranks])
    same(gradients, [weight] * len(ranks))  # every rank's tokens, on every rank
    wholes, gradients = zip(*on_ranks(layout, unshard), strict=True)
    same(wholes, [x] * len(ranks))
    added = weight * sum(1 + rank for rank in ranks)
    for rank, got in enumerate(gradients):
        torch.testing.assert_close(got, layout.shard(added, rank, dim), rtol=1e-13, atol=1e-13)


@pytest.mark.covering(1)
@TRIP
@pytest.mark.parametrize("rounds", [0, 1, -1, -3])
@pytest.mark.parametrize("beyond", [0, 1, -1, 4])
def test_roll(name: str, rounds: int, beyond: int) -> None:
    layout = LAYOUTS[name]
    x, shifts = whole(layout, 1), rounds * layout.total + beyond
    weight = torch.cos(x)

    def roll(comm: Comm) -> tuple[Tensor, Tensor]:
        mine = layout.shard(x, comm.rank).clone().requires_grad_()
        result = wrap_roll_func(mine, shifts, layout, comm)
        return grad(result, mine, layout.shard(weight, comm.rank))

    moved, gradients = zip(*on_ranks(layout, roll), strict=True)
    ranks = range(layout.group_size)
    same(moved, [layout.shard(torch.roll(x, shifts, 1), rank).contiguous() for rank in ranks])
    same(gradients, [layout.shard(torch.roll(weight, -shifts, 1), r).contiguous() for r in ranks])


@pytest.mark.parametrize("dim", [0, 2])
def test_roll_along_any_dim(dim: int) -> None:
    layout = LAYOUTS["zigzag"]
    x = whole(layout, dim)
    moved = on_ranks(
        layout,
        lambda comm: wrap_roll_func(layout.shard(x, comm.rank, dim), -1, layout, comm, dim),
    )
    assert torch.equal(layout.unshard(moved, dim), torch.roll(x, -1, dim))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.bfloat16])
def test_labels_and_other_dtypes(dtype: torch.dtype) -> None:
    layout = LAYOUTS["zigzag of documents"]
    x = whole(layout, 0, torch.int64)
    x = (x % 2 == 0) if dtype == torch.bool else x.to(dtype)

    def chain(comm: Comm) -> Tensor:
        mine = wrap_shard_func(x, layout, comm, 0)
        rolled = wrap_roll_func(mine, -1, layout, comm, 0)
        return wrap_unshard_func(
            wrap_shuffle_func(wrap_unshuffle_func(rolled, layout, comm, 0), layout, comm, 0),
            layout,
            comm,
            0,
        )

    same(on_ranks(layout, chain), [torch.roll(x, -1, 0)] * 3)


def test_labels_of_the_next_token() -> None:
    """One dim only; the last token of the sequence gets the first's label."""
    layout = LAYOUTS["striped"]
    labels = torch.arange(100, 116)
    got = on_ranks(
        layout,
        lambda comm: wrap_roll_func(layout.shard(labels, comm.rank, 0), -1, layout, comm, 0),
    )
    assert got[3].tolist() == [104, 108, 112, 100]


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_a_kind_by_name_is_the_layout_of_as_many_tokens_on_every_rank(kind: str) -> None:
    layout = {"contiguous": Layout.contiguous, "zigzag": Layout.zigzag, "striped": Layout.striped}
    before, after = Layout.contiguous(16, 4), layout[kind](16, 4)
    x = whole(before, 1)

    def there(comm: Comm) -> list[Tensor]:
        moved = wrap_shuffle_func(before.shard(x, comm.rank), kind, comm)
        back = wrap_unshuffle_func(moved, kind, comm)
        rolled = wrap_roll_func(moved, 5, kind, comm)
        return [moved, back, rolled, wrap_shard_func(x, kind, comm)]

    moved, back, rolled, sharded = zip(*on_ranks(before, there), strict=True)
    want = [after.shard(x, rank).contiguous() for rank in range(4)]
    same(moved, want)
    same(sharded, want)
    assert torch.equal(before.unshard(back), x)
    assert torch.equal(after.unshard(rolled), torch.roll(x, 5, 1))
    wholes = on_ranks(before, lambda c: wrap_unshard_func(after.shard(x, c.rank), kind, c))
    same(wholes, [x] * 4)


def test_on_one_rank_they_are_the_identity() -> None:
    x = whole(Layout.contiguous(6, 1), 1).requires_grad_()
    for layout in ("zigzag", "striped", Layout.zigzag(6, 1), Layout.from_sizes([6])):
        for op in (wrap_shuffle_func, wrap_unshuffle_func, wrap_shard_func, wrap_unshard_func):
            result = op(x, layout)
            assert torch.equal(result, x)
            assert torch.equal(torch.autograd.grad(result.square().sum(), x)[0], 2 * x)
        assert torch.equal(wrap_roll_func(x, 2, layout), torch.roll(x, 2, 1))


numbers = st.integers(0, 12)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(
    sizes=st.lists(numbers, min_size=1, max_size=5),
    shifts=st.integers(-30, 30),
    order=st.randoms(use_true_random=False),
)
def test_any_layout_any_shift(sizes: list[int], shifts: int, order: Any) -> None:
    """Tokens in any order on ranks of any sizes: values and gradients of shuffle, roll, unshard."""
    held = list(range(sum(sizes)))
    order.shuffle(held)
    layout = Layout.from_ranges(
        [[(n, n + 1) for n in (held.pop() for _ in range(s))] for s in sizes]
    )
    before, x = plain(layout), whole(layout, 1)

    def chain(comm: Comm) -> tuple[Tensor, Tensor]:
        mine = before.shard(x, comm.rank).clone().requires_grad_()
        result = wrap_roll_func(wrap_shuffle_func(mine, layout, comm), shifts, layout, comm)
        result = wrap_unshard_func(result, layout, comm) / comm.size
        return grad(result, mine, x)

    rolled, back = torch.roll(x, shifts, 1), torch.roll(x, -shifts, 1)
    for rank, (got, gradient) in enumerate(on_ranks(layout, chain)):
        torch.testing.assert_close(got * len(sizes), rolled, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(gradient, before.shard(back, rank), rtol=1e-13, atol=1e-13)


def test_a_roll_moves_only_what_changes_rank() -> None:
    layout = Layout.contiguous(16, 4)
    x = whole(layout, 1)

    def received(comm: Comm) -> int:
        wrap_roll_func(layout.shard(x, comm.rank), -1, layout, comm)
        return comm.counters.received_bytes

    assert on_ranks(layout, received) == [2 * 4 * 8] * 4  # one token


def test_a_model_in_a_layout_is_the_model() -> None:
    """shuffle -> attention in the layout -> unshuffle, values and gradients."""
    layout, before = Layout.zigzag(18, 3), Layout.contiguous(18, 3)
    x = torch.randn(2, 18, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = torch.cos(x)

    def of_rank(comm: Comm) -> tuple[Tensor, Tensor]:
        mine = before.shard(x, comm.rank).clone().requires_grad_()
        q = wrap_shuffle_func(mine, layout, comm)
        out = wrap_ring_attn_func(q, q * 2, q[..., :8] + 1, process_group=comm, layout=layout)
        result = wrap_unshuffle_func(out, layout, comm)
        return grad(result, mine, before.shard(weight, comm.rank))

    leaf = x.clone().requires_grad_()
    want = grad(wrap_ring_attn_func(leaf, leaf * 2, leaf + 1), leaf, weight)
    for got, exact in zip(zip(*on_ranks(before, of_rank), strict=True), want, strict=True):
        torch.testing.assert_close(before.unshard(got), exact, rtol=1e-10, atol=1e-10)


def test_a_packed_model_in_a_layout_is_the_model() -> None:
    cu = [0, 7, 8, 8, 20]
    layout, before = Layout.zigzag(20, 3, cu), Layout.contiguous(20, 3)
    x = torch.randn(20, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = torch.cos(x)

    def attend(q: Tensor, **where: Any) -> Any:
        return wrap_ring_attn_varlen_func(q, q * 2, q + 1, cu, cu, causal=True, **where)

    def of_rank(comm: Comm) -> tuple[Tensor, Tensor]:
        mine = before.shard(x, comm.rank, 0).clone().requires_grad_()
        q = wrap_shuffle_func(mine, layout, comm, 0)
        out = attend(q, process_group=comm, layout=layout)
        result = wrap_unshuffle_func(out, layout, comm, 0)
        return grad(result, mine, before.shard(weight, comm.rank, 0))

    leaf = x.clone().requires_grad_()
    want = grad(attend(leaf), leaf, weight)
    for got, exact in zip(zip(*on_ranks(before, of_rank), strict=True), want, strict=True):
        torch.testing.assert_close(before.unshard(got, 0), exact, rtol=1e-10, atol=1e-10)


X = torch.zeros(2, 4, 3)
ODD = torch.zeros(2, 3, 3)
ERRORS: list[tuple[Callable[[Comm], Any], str]] = [
    (
        lambda c: wrap_shuffle_func(X, "zigzag", c, 3),
        "wrap_shuffle_func: dim must be 0 .. 2, got 3",
    ),
    (lambda c: wrap_unshuffle_func(X, "zigzag", c, -1), "wrap_unshuffle_func: dim must be 0 .. 2"),
    (lambda c: wrap_shuffle_func(X, "spiral", c), "unknown layout 'spiral"),
    (lambda c: wrap_shuffle_func(X, Layout.zigzag(8, 4), c), "is for 4 ranks, but the group has 2"),
    (
        lambda c: wrap_shuffle_func(X, Layout.zigzag(10, 2), c),
        "should be the 5 tokens that rank 0 of 2 holds in layout contiguous:10:2",
    ),
    (
        lambda c: wrap_unshuffle_func(X, Layout.from_sizes([5, 3]), c),
        "should be the 5 tokens that rank 0 of 2 holds in layout sizes:5,3",
    ),
    (
        lambda c: wrap_shard_func(X, Layout.zigzag(8, 2), c),
        "wrap_shard_func: dim 1 of (2, 4, 3) should be the 8 tokens",
    ),
    (
        lambda c: wrap_unshard_func(X, Layout.zigzag(4, 2), c),
        "wrap_unshard_func: dim 1 of (2, 4, 3) should be the 2 tokens",
    ),
    (
        lambda c: wrap_roll_func(X, 1, Layout.zigzag(4, 2), c),
        "wrap_roll_func: dim 1 of (2, 4, 3) should be the 2 tokens",
    ),
    (lambda c: wrap_shuffle_func(X, "zigzag", "world"), "process_group must be"),
    (lambda c: wrap_shuffle_func(X, 3, c), "wrap_shuffle_func: layout must be a Layout or"),
    (lambda c: wrap_shard_func(X, None, c), "wrap_shard_func: layout must be a Layout or"),
    (lambda c: wrap_unshuffle_func([1, 2], "zigzag", c), "wrap_unshuffle_func: x must be a tensor"),
    (lambda c: wrap_roll_func(X, 1.5, "zigzag", c), "wrap_roll_func: shifts must be an integer"),
    (lambda c: wrap_roll_func(X, "1", "zigzag", c), "wrap_roll_func: shifts must be an integer"),
    (
        lambda c: wrap_shuffle_func(ODD, "zigzag", c),
        "wrap_shuffle_func: 'zigzag' of 6 tokens gives the ranks [2, 4] tokens",
    ),
]


@pytest.mark.parametrize(("call", "message"), ERRORS, ids=[message[:50] for _, message in ERRORS])
def test_errors(call: Callable[[Comm], Any], message: str) -> None:
    def of_rank(comm: Comm) -> str:
        comm.start = None  # type: ignore[assignment]  # nothing may be sent
        with pytest.raises(ValueError) as caught:
            call(comm)
        return str(caught.value)

    first, second = run_ranks(2, of_rank)
    assert message in first
    same_for_all = re.sub(r"the \d tokens that rank \d", "the n tokens that rank r", first)
    assert same_for_all == re.sub(r"the \d tokens that rank \d", "the n tokens that rank r", second)


def test_a_wrong_call_on_one_rank_stops_all() -> None:
    def of_rank(comm: Comm) -> str:
        with pytest.raises(ValueError) as caught:
            wrap_shuffle_func(X[:, : 4 - comm.rank], Layout.zigzag(8, 2), comm)
        return str(caught.value)

    first, second = run_ranks(2, of_rank)
    assert "should be the 4 tokens that rank 1 of 2 holds" in second
    assert f"refused on another rank of the group\nrank 1: {second}" in first


@pytest.mark.parametrize(
    ("call", "column"),
    [
        (lambda x, c: wrap_roll_func(x, c.rank, Layout.contiguous(8, 2), c, 0), "shifts"),
        (lambda x, c: wrap_shuffle_func(x, ["zigzag", "striped"][c.rank], c, 0), "to"),
        (
            lambda x, c: wrap_maybe_shuffle(x, [[0, 8], [0, 4, 8]][c.rank], process_group=c),
            "cu_seqlens",
        ),
        (lambda x, c: wrap_roll_func(x[: 4 - c.rank], 1, "contiguous", c, 0), "tokens"),
        (lambda x, c: wrap_shuffle_func(x[: 4 - 4 * c.rank], "zigzag", c, 0), "tokens"),
        (lambda x, c: wrap_unshard_func(x[: 4 - c.rank], "contiguous", c, 0), "tokens"),
        (lambda x, c: wrap_shard_func(x[: 4 - 2 * c.rank], "contiguous", c, 0), "tokens"),
        (
            lambda x, c: wrap_shuffle_func(x.to([x.dtype, torch.int32][c.rank]), "zigzag", c, 0),
            "dtype",
        ),
        (
            lambda x, c: wrap_shuffle_func(x[:, None].expand(4, 2 + c.rank), "zigzag", c, 0),
            "other dims",
        ),
        (
            lambda x, c: wrap_maybe_shuffle(
                x.to([x.dtype, torch.int32][c.rank]), [0, 8], process_group=c
            ),
            "dtype",
        ),
        (
            lambda x, c: wrap_maybe_shuffle(
                x[:, None].expand(4, 2 + c.rank), [0, 8], process_group=c
            ),
            "other dims",
        ),
    ],
)
def test_ranks_that_disagree_are_told(call: Any, column: str) -> None:
    def body(comm: Comm) -> None:
        with pytest.raises(DisagreementError, match=f"do not agree\n  rank  {column}"):
            call(torch.zeros(4), comm)

    run_ranks(2, body)


def test_uneven_shards_that_an_engine_cut() -> None:
    """A kind by name stands for it over the whole length, and "whole" for the contiguous shards."""
    cut, x = Layout.contiguous(7, 2), whole(Layout.contiguous(7, 2), 1)

    def of_rank(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        mine = cut.shard(x, comm.rank).clone().requires_grad_()
        rolled = move_tokens(mine, "contiguous", "contiguous", -4, 1, comm.name, 7)
        (gradient,) = torch.autograd.grad(rolled, mine, cut.shard(torch.cos(x), comm.rank))
        sharded = move_tokens(mine.detach(), "whole", "contiguous", 0, 1, comm.name, 7)
        return rolled.detach(), gradient, sharded

    rolled, gradients, sharded = zip(*on_ranks(cut, of_rank), strict=True)
    assert torch.equal(cut.unshard(rolled), torch.roll(x, -4, 1))
    assert torch.equal(cut.unshard(gradients), torch.roll(torch.cos(x), 4, 1))
    assert torch.equal(cut.unshard(sharded), x)


@pytest.mark.parametrize(
    ("source", "target"), [("contiguous", "zigzag"), ("zigzag", "zigzag"), ("whole", "zigzag")]
)
def test_shards_that_a_kind_by_name_would_change(source: str, target: str) -> None:
    cut, x = Layout.contiguous(7, 2), whole(Layout.contiguous(7, 2), 1)

    def of_rank(comm: Comm) -> str:
        comm.start = None  # type: ignore[assignment]  # nothing may be sent
        with pytest.raises(ArgumentError) as caught:
            move_tokens(cut.shard(x, comm.rank), source, target, 0, 1, comm.name, 7)
        return str(caught.value)

    first, second = run_ranks(2, of_rank)
    assert first == second
    assert "zigzag:7:2 gives the ranks [3, 4] tokens, but 7 tokens are cut into [4, 3]" in first


def test_documents_that_do_not_end_where_an_engine_cut() -> None:
    def of_rank(comm: Comm) -> str:
        comm.start = None  # type: ignore[assignment]  # nothing may be sent
        x = torch.zeros(4 - comm.rank, 2)
        with pytest.raises(ArgumentError) as caught:
            shuffle_documents(x, torch.tensor([0, 8]), False, comm.name, 7)
        return str(caught.value)

    first, second = run_ranks(2, of_rank)
    assert first == second
    assert "wrap_maybe_shuffle: cu_seqlens ends at 8 but there are 7 tokens" in first
