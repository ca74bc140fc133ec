"""What a call does on the host again when one alike was made before: next to nothing."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from annotations.registry import OpRecord
from customized_ops.ring_attention import Layout, wrap_ring_attn_func, wrap_ring_attn_varlen_func
from customized_ops.ring_attention.core.comm import Comm
from customized_ops.ring_attention.core.comm.inprocess import run_ranks
from customized_ops.ring_attention.op import eager
from customized_ops.ring_attention.op.arguments import ArgumentError

from .host_work_cases import OPS, counted, inputs, train


@pytest.mark.parametrize("name", OPS)
def test_a_call_alike_is_not_checked_and_planned_again(name: str) -> None:
    train_once = partial(train, OPS[name], 16, name == "packed")
    with counted() as first:
        train_once(softmax_scale=0.321)
    assert all(first.values()), "a piece of work that is never done is not worth counting"
    with counted() as again:
        train_once(softmax_scale=0.321)
    assert not any(again.values()), again
    with counted() as other:
        train_once(softmax_scale=0.322)
    assert all(other.values()), other


def test_of_other_documents_nothing_else_is_checked_again() -> None:
    attend = partial(train, wrap_ring_attn_varlen_func, 16, True, softmax_scale=0.323)
    attend(cu_seqlens_q=[0, 5, 16], cu_seqlens_k=[0, 5, 16])
    with counted() as other:
        attend(cu_seqlens_q=(ends := [0, 3, 9, 16]), cu_seqlens_k=ends)
    assert other["make_plan"] and other["choose"] and not other["_checked"] and not other["bind"]
    for ends, wrong in ([0, 9, 3, 16], "must not fall"), ([0, 9, 17], "ends at 17 but there are"):
        with pytest.raises(ArgumentError, match=f"cu_seqlens_q {wrong}"):
            attend(cu_seqlens_q=ends, cu_seqlens_k=ends)
    with pytest.raises(ArgumentError, match="cu_seqlens_q must be int32 or int64"):
        attend(cu_seqlens_q=torch.tensor([0.0, 16.0]), cu_seqlens_k=[0, 16])


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_call_alike_goes_past_the_op(name: str, ranks: int, unchecked: None) -> None:
    def rank(comm: Comm) -> int:
        seen = 0
        for _ in range(2):
            before = len(ran)
            train(OPS[name], 16 // ranks, name == "packed", process_group=comm, softcap=0.4)
            comm.all_gather_object(None)
            seen = len(ran) - before
        return seen

    bind, arguments, ran, dispatched = eager.bind, OpRecord.arguments, [], []

    def counting(*given: Any, **options: Any) -> Any:
        ran.append(None)
        return bind(*given, **options)

    def of_the_op(self: OpRecord, *given: Any) -> Any:
        dispatched.append(None)
        return arguments(self, *given)

    with (
        mock.patch.object(eager, "bind", counting),
        mock.patch.object(OpRecord, "arguments", of_the_op),
    ):
        assert run_ranks(ranks, rank) == [0] * ranks
    assert len(ran) == ranks, "each rank's first call is bound"
    assert not dispatched, "no call is one of the op in a graph"


def test_nor_is_one_on_two_ranks() -> None:
    def rank(comm: Comm) -> None:
        for _ in range(2):
            train(wrap_ring_attn_func, 8, process_group=comm, softmax_scale=0.323)

    with counted() as times:
        run_ranks(2, rank)
    assert times["make_plan"] == times["choose"] == 2  # once on each


def test_options_with_tensors_are_told_apart_by_shape_and_the_tensors_let_go() -> None:
    slopes = torch.tensor([0.1, 0.2, 0.3, 0.4])
    seen = weakref.ref(slopes)
    q, k, v = inputs(16, packed=False)
    first = wrap_ring_attn_func(q, k, v, alibi_slopes=slopes)
    with counted() as again:
        slopes.mul_(2)
        second = wrap_ring_attn_func(q, k, v, alibi_slopes=slopes)
    assert not any(again.values()), again
    assert not torch.equal(first, second), "the slopes of the first call were used"
    with pytest.raises(ArgumentError, match="alibi_slopes must be"):
        wrap_ring_attn_func(q, k, v, alibi_slopes=slopes[:3])
    with pytest.raises(ValueError, match="alibi_slopes"):  # another batch
        wrap_ring_attn_func(q, k, v, alibi_slopes=slopes.expand(3, 4))
    del first, second, slopes
    gc.collect()
    assert seen() is None


def test_documents_are_told_apart_by_value() -> None:
    q, k, v = inputs(16, packed=True)
    cu = torch.tensor([0, 5, 16], dtype=torch.int32)
    one = wrap_ring_attn_varlen_func(q, k, v, cu, cu)
    cu[1] = 6
    two = wrap_ring_attn_varlen_func(q, k, v, cu, cu)
    assert not torch.equal(one, two)
    assert torch.equal(two, wrap_ring_attn_varlen_func(q, k, v, [0, 6, 16], [0, 6, 16]))
    three = wrap_ring_attn_varlen_func(q, k, v, cu.long(), cu.numpy())
    assert torch.equal(two, three)
    cu.numpy()[1] = 7
    four = wrap_ring_attn_varlen_func(q, k, v, cu.long(), cu.numpy())
    assert torch.equal(four, wrap_ring_attn_varlen_func(q, k, v, [0, 7, 16], (0, 7, 16)))
    assert not torch.equal(three, four)
    cu[1] = 17
    for _ in range(2):
        with pytest.raises(ArgumentError, match="must not fall"):
            wrap_ring_attn_varlen_func(q, k, v, cu, cu)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"causal": True}, {"causal": 1.0}),
        ({"window_size": (4, 0)}, {"window_size": (4.0, 0)}),
        ({"softcap": 1}, {"softcap": True}),
        ({"q_rows": None}, {"q_rows": (0, 2)}),
        ({"layout": None}, {"layout": Layout.contiguous(16, 2)}),
    ],
)
def test_what_only_looks_alike_is_refused(good: dict[str, Any], bad: dict[str, Any]) -> None:
    q, k, v = inputs(16, packed=False)
    wrap_ring_attn_func(q, k, v, **good)
    for _ in range(2):
        with pytest.raises(ArgumentError):
            wrap_ring_attn_func(q, k, v, **bad)


def test_compared_calls_are_compared_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQSHARD_CHECK", "1")

    def rank(comm: Comm) -> None:
        for softcap in (0.0, 0.0, 1.0 + comm.rank):
            q, k, v = inputs(8, packed=False)
            wrap_ring_attn_func(q, k, v, softcap=softcap, process_group=comm)

    with pytest.raises(ValueError, match="do not agree"):
        run_ranks(2, rank)
