"""What a call does on the host again when one alike was made before: next to nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from annotations.registry import OpRecord
from customized_ops.ring_attention import (
    Layout,
    PackDocuments,
    PackedBatch,
    group_costs,
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
)
from customized_ops.ring_attention.core.comm import Comm
from customized_ops.ring_attention.core.comm.comm_groups import ALONE, FakeComm
from customized_ops.ring_attention.core.comm.inprocess import run_ranks
from customized_ops.ring_attention.op import bound as bind
from customized_ops.ring_attention.op import call, eager
from customized_ops.ring_attention.op import call as kernel_request
from customized_ops.ring_attention.op.arguments import ArgumentError

from .host_work_cases import OPS, inputs, train

WORK = [
    (eager, "_checked"),
    (call, "make_plan"),
    (bind, "check_name"),
    (kernel_request, "choose"),
    (OpRecord, "bind"),
]


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How often each piece of WORK is done inside, by name; by any thread."""
    times = {name: 0 for _, name in WORK}

    def count(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            times[name] += 1
            return function(*args, **kwargs)

        return counting

    with ExitStack() as patches:
        for where, name in WORK:
            patches.enter_context(mock.patch.object(where, name, count(name, getattr(where, name))))
        yield times


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


def batches_of(comm: Comm, layout: str) -> list[PackedBatch]:
    """Of equally many tokens, so that each rank's tensors have the same shapes."""
    bounds = [[0, 5, 16], [0, 3, 9, 16], [0, 16], [0, 1, 1, 7, 14, 16]]
    pack = PackDocuments(
        comm.size, comm.rank, (4, 2), layout=layout, head_dim=8, costs=group_costs(comm)
    )
    return [pack([[1] * n for n in np.diff(each)]) for each in bounds]


def attend_batch(comm: Comm, batch: PackedBatch, **given: Any) -> list[torch.Tensor]:
    """out and the gradients of this rank's tokens; all tokens are drawn from one seed."""
    source = torch.Generator().manual_seed(len(batch.cu_seqlens))
    whole = [torch.randn(16, h, 8, generator=source, dtype=torch.float64) for h in (4, 2, 2, 4)]
    layout, cu = batch.layout, batch.cu_seqlens
    q, k, v, dout = whole if comm.size == 1 else [layout.shard(t, comm.rank, 0) for t in whole]
    leaves = [t.requires_grad_() for t in (q, k, v)]
    options: Any = {"causal": True, "softmax_scale": 0.324, "layout": layout, **given}
    if comm.size > 1:
        options["process_group"] = comm
    else:
        del options["layout"]
    out = wrap_ring_attn_varlen_func(*leaves, cu, cu, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("layout", ["balanced", "contiguous"])
def test_batches_made_ahead_are_bound_like_one_before(layout: str, unchecked: None) -> None:
    """The kernel is chosen for each; results are those of one device."""

    def rank(comm: Comm) -> tuple[list[PackedBatch], list[Any], dict[str, int]]:
        first, *others = batches_of(comm, layout)
        found = [attend_batch(comm, first)]
        comm.all_gather_object(None)
        with counted() if comm.rank == 0 else nullcontext({}) as times:  # it counts both ranks
            comm.all_gather_object(None)
            found += [attend_batch(comm, batch) for batch in others]
            comm.all_gather_object(None)
        return [first, *others], found, times

    of_ranks = run_ranks(2, rank)
    times = of_ranks[0][2]
    assert times.pop("choose") == 2 * 3 and not any(times.values()), times
    for n, batch in enumerate(of_ranks[0][0]):
        parts = zip(*(found[n] for _, found, _ in of_ranks), strict=True)
        for whole, each in zip(attend_batch(ALONE, batch), parts, strict=True):
            got = batch.layout.unshard(list(each), dim=0)
            torch.testing.assert_close(got, whole, rtol=0, atol=1e-10)


def test_the_layout_of_another_batch_is_still_told() -> None:
    comm = FakeComm(0, 2)
    first, second, third, _ = batches_of(comm, "balanced")
    assert second.layout != third.layout
    attend_batch(comm, first)
    with pytest.warns(UserWarning, match="results are WRONG without layout=batch.layout"):
        attend_batch(comm, second, layout=third.layout)
    with pytest.raises(ArgumentError, match="holds 32 tokens, but the sequence has 16"):
        attend_batch(comm, third, layout=Layout.contiguous(32, comm.size))
