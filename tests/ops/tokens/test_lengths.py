"""Ranks that hold different numbers of tokens and give no layout."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from customized_ops.ring_attention import (
    Layout,
    run_ranks,
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
    wrap_sliding_window_attn_func,
    wrap_streaming_attn_func,
    wrap_zigzag_attn_func,
)
from customized_ops.ring_attention.core.comm import Comm
from customized_ops.ring_attention.core.kernels.adapters import torch_ops
from customized_ops.ring_attention.op.arguments import ArgumentError

pytestmark = pytest.mark.usefixtures("unchecked")  # as on GPUs


@pytest.mark.parametrize(
    "op",
    [
        wrap_ring_attn_func,
        wrap_zigzag_attn_func,
        lambda *t, **group: wrap_sliding_window_attn_func(*t, window_size=(2, 0), **group),
        lambda *t, **group: wrap_streaming_attn_func(*t, 2, 1, **group),
    ],
)
def test_all_ranks_are_told(op: Any) -> None:
    layout = Layout.from_sizes([4, 6, 5])
    q = torch.randn(1, 15, 2, 4)

    def body(comm: Comm) -> None:
        mine = layout.shard(q, comm.rank)
        with pytest.raises(ArgumentError, match=re.escape("Layout.from_sizes([4, 6, 5])")):
            op(mine, mine, mine, process_group=comm)
        assert comm.counters.sent_bytes == 0
        op(mine[:, :4], mine[:, :4], mine[:, :4], process_group=comm)  # the next call works

    run_ranks(3, body)


def test_the_ranks_ask_once_a_length() -> None:
    q = torch.randn(1, 12, 2, 4)

    def body(comm: Comm) -> int:
        asked = 0
        gather = comm.all_gather_object

        def count(value: Any) -> list[Any]:
            nonlocal asked
            asked += 1
            return gather(value)

        comm.all_gather_object = count  # type: ignore[method-assign]
        for length in (4, 4, 6, 4, 6):
            mine = q[:, :length].clone().requires_grad_()
            wrap_ring_attn_func(mine, mine, mine, process_group=comm).sum().backward()
        wrap_ring_attn_func(
            q[:, :5], q[:, :5], q[:, :5], process_group=comm, layout=Layout.contiguous(10, 2)
        )
        return asked

    assert run_ranks(2, body) == [2, 2]


@pytest.mark.parametrize("before", [[(16, 16)], [(16, 16), (17, 17)]])
def test_lengths_that_some_have_met(
    before: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that has met a length of its own, where its peer has not or has met another."""
    monkeypatch.delenv("SEQSHARD_CHECK")

    def attend(comm: Comm, lengths: tuple[int, int]) -> None:
        q = torch.randn(1, lengths[comm.rank], 2, 8)
        wrap_ring_attn_func(q, q, q, process_group=comm)

    def body(comm: Comm) -> None:
        for lengths in before:
            attend(comm, lengths)
        with pytest.raises(
            ValueError, match=r"(?s)contiguous:32:2.*contiguous:34:2.*Layout.from_sizes"
        ):
            attend(comm, (16, 17))
        attend(comm, (17, 17))

    run_ranks(2, body)


def test_threads_need_a_seed() -> None:
    """Also where the call with a seed was cached before."""
    q = torch.randn(1, 8, 2, 4)

    def body(comm: Comm) -> None:
        wrap_ring_attn_func(q, q, q, process_group=comm, dropout_p=0.5, dropout_seed=5)
        with pytest.raises(ArgumentError, match="give dropout_seed"):
            wrap_ring_attn_func(q, q, q, process_group=comm, dropout_p=0.5)

    run_ranks(2, body)
    wrap_ring_attn_func(q, q, q, dropout_p=0.5)


def test_a_batch_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank has of a batch that is split over more ranks than it has entries. Kernels refuse
    such calls, so none is made."""
    for name in ("forward", "backward"):
        monkeypatch.setattr(torch_ops, name, None)
    q, k = torch.randn(0, 9, 4, 8, requires_grad=True), torch.randn(0, 9, 2, 8, requires_grad=True)
    out, lse = wrap_ring_attn_func(q, k, k, kernel="torch", return_lse=True)
    assert out.shape == (0, 9, 4, 8) and lse.shape == (0, 4, 9)
    (out.sum() + lse.sum()).backward()
    assert q.grad is not None and q.grad.shape == q.shape
    assert k.grad is not None and k.grad.shape == k.shape


def test_lengths_of_a_ranks_own_tokens() -> None:
    """Each rank has the documents of its own part in mind."""
    q = torch.randn(8, 2, 4)

    def body(comm: Comm) -> None:
        with pytest.raises(ArgumentError, match="the cumulative lengths of the whole sequence"):
            wrap_ring_attn_varlen_func(q, q, q, [0, 3, 8], [0, 3, 8], process_group=comm)

    run_ranks(2, body)
