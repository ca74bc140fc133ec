"""What a call does on the host again when one alike was made before: next to nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from annotations.registry import OpRecord
from customized_ops.ring_attention import (
    AttnMask,
    Layout,
    wrap_masked_attn_func,
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
    wrap_sliding_window_attn_func,
    wrap_streaming_attn_func,
    wrap_zigzag_attn_func,
)
from customized_ops.ring_attention.core.comm import Comm
from customized_ops.ring_attention.core.comm.inprocess import run_ranks
from customized_ops.ring_attention.op import bound as bind
from customized_ops.ring_attention.op import call, eager
from customized_ops.ring_attention.op import call as kernel_request
from customized_ops.ring_attention.op.arguments import ArgumentError

WORK = [
    (eager, "_checked"),
    (call, "make_plan"),
    (bind, "check_name"),
    (kernel_request, "choose"),
    (OpRecord, "bind"),
]

Attend = Callable[..., Any]
OPS: dict[str, Attend] = {
    "ring": wrap_ring_attn_func,
    "zigzag": wrap_zigzag_attn_func,
    "window": partial(wrap_sliding_window_attn_func, window_size=[5, 0]),
    "streaming": partial(wrap_streaming_attn_func, window=4, sink_tokens=2),
    "masked": partial(wrap_masked_attn_func, mask=AttnMask.prefix_lm(16, 5)),
    "packed": partial(wrap_ring_attn_varlen_func, cu_seqlens_q=[0, 5, 16], cu_seqlens_k=[0, 5, 16]),
}


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


def inputs(tokens: int, packed: bool, heads: int = 4) -> list[Tensor]:
    lead = () if packed else (1,)
    shapes = [(*lead, tokens, h, 8) for h in (heads, 2, 2)]
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def train(attend: Attend, tokens: int, packed: bool = False, **options: Any) -> None:
    out = attend(*inputs(tokens, packed), **options)
    (out[0] if isinstance(out, tuple) else out).sum().backward()


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


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks do not compare calls, so none of them has to look into one known before."""
    monkeypatch.setenv("SEQSHARD_CHECK", "0")


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


class Seen(TorchDispatchMode):
    """The names of the ops of ours that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "seqshard":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_both_ops_wherever_it_begins() -> None:
    with Seen() as both:
        train(wrap_ring_attn_func, 16)
    assert both.names == ["ring_attn", "ring_attn_backward"]
    out = wrap_ring_attn_func(*inputs(16, packed=False))
    with Seen() as backward:
        out.sum().backward()
    assert backward.names == ["ring_attn_backward"]


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("return_lse", [False, True])
def test_results_and_gradients_are_those_of_the_first_call(name: str, return_lse: bool) -> None:
    q, k, v = inputs(16, packed=name == "packed")
    found = []
    for _ in range(3):
        outs = OPS[name](q, k, v, softmax_scale=0.325, return_lse=return_lse)
        outs = outs if return_lse else (outs,)
        grads = torch.autograd.grad(sum(out.square().sum() for out in outs), (q, k, v))
        found.append((*outs, *grads))
    for again in found[1:]:
        assert all(map(torch.equal, found[0], again))
        assert all(t.is_contiguous() for t in again)


def test_a_call_again_needs_only_the_gradients_that_are_asked_for() -> None:
    q, k, v = inputs(16, packed=False)
    first = torch.autograd.grad(wrap_ring_attn_func(q, k, v).sum(), v)
    again = torch.autograd.grad(wrap_ring_attn_func(q.detach(), k.detach(), v).sum(), v)
    assert torch.equal(first[0], again[0])
    with torch.no_grad():
        assert not wrap_ring_attn_func(q, k, v).requires_grad
    assert not wrap_ring_attn_func(q.detach(), k.detach(), v.detach()).requires_grad
    with torch.inference_mode():
        assert torch.equal(wrap_ring_attn_func(q, k, v), wrap_ring_attn_func(q, k, v).clone())


def test_a_call_again_is_recomputed_from_a_checkpoint() -> None:
    q, k, v = inputs(16, packed=True)
    cu = torch.tensor([0, 5, 16], dtype=torch.int32)
    packed = partial(wrap_ring_attn_varlen_func, softmax_scale=0.326)
    out = checkpoint(packed, q, k, v, cu, cu, use_reentrant=False)  # known only when recomputed
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    again = torch.autograd.grad(packed(q, k, v, cu, cu).sum(), (q, k, v))
    assert all(map(torch.equal, grads, again))


def test_a_call_again_has_its_place_in_profiles_and_graphs() -> None:
    for _ in range(2):
        out = wrap_ring_attn_func(*inputs(16, packed=False))
        assert out.grad_fn is not None and out.grad_fn.name() == "ring_attnBackward"
    with torch.profiler.profile() as profile:
        wrap_ring_attn_func(*inputs(16, packed=False))
    assert "seqshard::ring_attn" in {event.name for event in profile.events()}


def test_second_derivatives_of_a_call_again_are_refused() -> None:
    q, k, v = inputs(16, packed=False)
    for _ in range(2):
        out = wrap_ring_attn_func(q, k, v)
        with pytest.raises(NotImplementedError, match="second derivatives"):
            (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
            dq.sum().backward()


def test_a_group_is_let_go_with_what_is_known_of_its_calls(unchecked: None) -> None:
    groups = []

    def rank(comm: Comm) -> None:
        groups.append(weakref.ref(comm))
        for _ in range(2):
            train(wrap_ring_attn_func, 8, process_group=comm)

    run_ranks(2, rank)
    gc.collect()
    assert [group() for group in groups] == [None, None]
