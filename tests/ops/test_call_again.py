"""A call alike: seen by modes, profiles and graphs, and with the gradients of the first."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from customized_ops.ring_attention import wrap_ring_attn_func, wrap_ring_attn_varlen_func
from customized_ops.ring_attention.core.comm import Comm
from customized_ops.ring_attention.core.comm.inprocess import run_ranks

from .host_work_cases import OPS, inputs, train


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
