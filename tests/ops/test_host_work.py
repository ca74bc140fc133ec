"""What a call does on the host again when one alike was made before: next to nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from annotations.registry import OpRecord
from customized_ops.ring_attention import (
    AttnMask,
    Layout,
    attention_call,
    attention_op,
    wrap_masked_attn_func,
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
    wrap_sliding_window_attn_func,
    wrap_streaming_attn_func,
    wrap_zigzag_attn_func,
)
from customized_ops.ring_attention.arguments import ArgumentError
from customized_ops.ring_attention.core.comm import Comm
from customized_ops.ring_attention.core.inprocess import run_ranks

WORK = [
    (attention_op, "_numbers_of"),
    (attention_op, "make_plan"),
    (attention_call, "check_name"),
    (attention_call, "choose"),
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

    with (
        mock.patch.multiple(
            attention_op, **{n: count(n, getattr(m, n)) for m, n in WORK if m is attention_op}
        ),
        mock.patch.multiple(
            attention_call, **{n: count(n, getattr(m, n)) for m, n in WORK if m is attention_call}
        ),
        mock.patch.object(OpRecord, "bind", count("bind", OpRecord.bind)),
    ):
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
    call = partial(train, OPS[name], 16, name == "packed")
    with counted() as first:
        call(softmax_scale=0.321)
    assert all(first.values()), "a piece of work that is never done is not worth counting"
    with counted() as again:
        call(softmax_scale=0.321)
    assert not any(again.values()), again
    with counted() as other:
        call(softmax_scale=0.322)
    assert all(other.values()), other


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
