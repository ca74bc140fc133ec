"""What ops that move tokens refuse, and what ranks that disagree are told."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusals import refusals
from torch import Tensor

from annotations.consistency import DisagreementError
from customized_ops.ring_attention import (
    Layout,
    run_ranks,
    wrap_maybe_shuffle,
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

from .layout_op_cases import on_ranks, whole

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
    first, second = refusals(2, call)
    assert message in first
    same_for_all = re.sub(r"the \d tokens that rank \d", "the n tokens that rank r", first)
    assert same_for_all == re.sub(r"the \d tokens that rank \d", "the n tokens that rank r", second)


def test_a_wrong_call_on_one_rank_stops_all() -> None:
    layout = Layout.zigzag(8, 2)
    first, second = refusals(2, lambda comm: wrap_shuffle_func(X[:, : 4 - comm.rank], layout, comm))
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

    def call(comm: Comm) -> None:
        move_tokens(cut.shard(x, comm.rank), source, target, 0, 1, comm.name, 7)

    first, second = refusals(2, call, ArgumentError)
    assert first == second
    assert "zigzag:7:2 gives the ranks [3, 4] tokens, but 7 tokens are cut into [4, 3]" in first


def test_documents_that_do_not_end_where_an_engine_cut() -> None:
    def call(comm: Comm) -> None:
        shuffle_documents(torch.zeros(4 - comm.rank, 2), torch.tensor([0, 8]), False, comm.name, 7)

    first, second = refusals(2, call, ArgumentError)
    assert first == second
    assert "wrap_maybe_shuffle: cu_seqlens ends at 8 but there are 7 tokens" in first
