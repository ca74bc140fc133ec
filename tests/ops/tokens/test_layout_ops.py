"""Shuffle, unshuffle, shard, unshard and roll on in-process ranks, against plain indexing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from customized_ops.ring_attention import (
    AttnMask,
    Layout,
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
    wrap_roll_func,
    wrap_shard_func,
    wrap_shuffle_func,
    wrap_unshard_func,
    wrap_unshuffle_func,
)
from customized_ops.ring_attention.core.comm import Comm

from .layout_op_cases import on_ranks, whole

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


def plain(layout: Layout) -> Layout:
    return Layout.contiguous(layout.total, layout.group_size)


def strided(x: Tensor) -> Tensor:
    """The same values with gaps in memory and its dims in another order."""
    wide = torch.stack([x, torch.full_like(x, -1)], dim=-1).permute(3, 2, 1, 0).contiguous()
    return wide.permute(3, 2, 1, 0)[..., 0]


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
