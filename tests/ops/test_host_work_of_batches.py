"""Batches that were made ahead are bound like one of their kind before, and only these."""

from __future__ import annotations

import gc
import warnings
import weakref
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from customized_ops.ring_attention import (
    Layout,
    PackDocuments,
    PackedBatch,
    group_costs,
    make_plan,
    wrap_ring_attn_varlen_func,
)
from customized_ops.ring_attention.core.comm import Comm
from customized_ops.ring_attention.core.comm.comm_groups import ALONE, FakeComm, comm_by_name
from customized_ops.ring_attention.core.comm.inprocess import run_ranks
from customized_ops.ring_attention.op import bound as bind
from customized_ops.ring_attention.op import eager
from customized_ops.ring_attention.op.arguments import ArgumentError
from customized_ops.ring_attention.op.tokens import call_layouts

from .host_work_cases import counted


@pytest.fixture
def afresh(unchecked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call was bound before, over a group of any name."""
    monkeypatch.setattr(bind, "_bound", weakref.WeakKeyDictionary())
    monkeypatch.setattr(eager, "_of_kinds", weakref.WeakKeyDictionary())


def batches_of(comm: Comm, layout: str) -> list[PackedBatch]:
    """Of equally many tokens, so that each rank's tensors have the same shapes."""
    bounds = [[0, 5, 16], [0, 3, 9, 16], [0, 16], [0, 1, 1, 7, 14, 16]]
    pack = PackDocuments(
        comm.size, comm.rank, (4, 2), layout=layout, head_dim=8, costs=group_costs(comm)
    )
    return [pack([[1] * n for n in np.diff(each)]) for each in bounds]


def attend_batch(
    comm: Comm,
    batch: PackedBatch,
    heads: tuple[int, ...] = (4, 2, 2, 4),
    tokens: int = 16,
    keys: torch.Tensor | None = None,
    **given: Any,
) -> list[torch.Tensor]:
    """out and the gradients of this rank's tokens; all tokens are drawn from one seed."""
    source = torch.Generator().manual_seed(len(batch.cu_seqlens))
    whole = [torch.randn(tokens, h, 8, generator=source, dtype=torch.float64) for h in heads]
    layout, cu = batch.layout, batch.cu_seqlens
    q, k, v, dout = whole if comm.size == 1 else [layout.shard(t, comm.rank, 0) for t in whole]
    leaves = [t.requires_grad_() for t in (q, k, v)]
    options: Any = {"causal": True, "softmax_scale": 0.324, "layout": layout, **given}
    if comm.size > 1:
        options["process_group"] = comm
    else:
        del options["layout"]
    out = wrap_ring_attn_varlen_func(*leaves, cu, cu if keys is None else keys, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("layout", ["balanced", "contiguous"])
def test_batches_made_ahead_are_bound_like_one_before(layout: str, unchecked: None) -> None:
    """The kernel is chosen anew where the mask is of another class: of one document, or several.
    Results are those of one device."""

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
    assert times.pop("choose") == 2 * 2 and not any(times.values()), times
    for n, batch in enumerate(of_ranks[0][0]):
        parts = zip(*(found[n] for _, found, _ in of_ranks), strict=True)
        for whole, each in zip(attend_batch(ALONE, batch), parts, strict=True):
            got = batch.layout.unshard(list(each), dim=0)
            torch.testing.assert_close(got, whole, rtol=0, atol=1e-10)


def test_the_layout_of_another_batch_is_still_told(afresh: None) -> None:
    comm = FakeComm(0, 2)
    first, second, third, _ = batches_of(comm, "balanced")
    assert second.layout != third.layout
    attend_batch(comm, first)
    with pytest.warns(UserWarning, match="results are WRONG without layout=batch.layout"):
        attend_batch(comm, second, layout=third.layout)
    with pytest.raises(ArgumentError, match="holds 32 tokens, but the sequence has 16"):
        attend_batch(comm, third, layout=Layout.contiguous(32, comm.size))


def test_the_layout_of_a_batch_with_another_mask_is_told(afresh: None) -> None:
    """Where the batch was packed without the window of the call."""
    comm, told = FakeComm(0, 2), "documents of these lengths were packed in another layout"
    lengths = [[1] * n for n in (35, 3, 2)]
    pack = PackDocuments(2, 0, (4, 2), head_dim=8, costs=group_costs(comm))
    batch, call = pack(lengths), {"tokens": 40, "window_size": (3, 0)}
    for layout in ("balanced", None):
        with pytest.warns(UserWarning, match=told):
            attend_batch(comm, batch, layout=layout, **call)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", told)
        attend_batch(comm, batch, **call)
        with_window = replace(pack, window_size=(3, 0))(lengths)
        assert with_window.layout != batch.layout
        attend_batch(comm, batch, softcap=2.0, **call)
        attend_batch(comm, with_window, layout="balanced", softcap=3.0, **call)


@pytest.mark.parametrize("call", [{"causal": False}, {"window_size": (3, 0)}], ids=str)
def test_a_batch_that_is_packed_for_other_attention_is_told(call: Any, afresh: None) -> None:
    """As where causal=True is forgotten."""
    comm, told = FakeComm(0, 2), "documents of these lengths were packed for attention with another"
    first, second, *_ = batches_of(comm, "contiguous")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend_batch(comm, first)
    with pytest.warns(UserWarning, match=told):
        attend_batch(comm, second, **call)


def test_a_batch_of_another_rank_is_told(afresh: None) -> None:
    """Of as many tokens as the rank has."""
    comm, options = FakeComm(1, 2), {"heads": (4, 2), "head_dim": 8}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend_batch(comm, PackDocuments(2, 1, **options)([[1] * 15, [1] * 17]), tokens=32)
    batch = PackDocuments(2, 0, **options)([[1] * 14, [1] * 18])
    with pytest.warns(UserWarning, match="were packed for rank 0, and this is rank 1 of the group"):
        attend_batch(comm, batch, tokens=32, softcap=2.0)


def test_little_is_kept_of_batches_that_are_gone() -> None:
    """No more than plans that are kept."""
    pack, known = PackDocuments(2, 0, (4, 2), head_dim=8), call_layouts._OF_BATCHES
    counts = []
    for first in (1, 101, 201):
        for n in range(first, first + 100):
            pack([[1] * n, [1] * (n + 7)])
        gc.collect()
        counts.append(len(known))
    assert counts[0] >= counts[1] == counts[2] < 300


def test_what_fits_no_batch_made_ahead_is_checked(afresh: None) -> None:
    """Though the call before it was of the same kind."""
    comm, four = FakeComm(0, 2), FakeComm(0, 4)
    first, second, third, last = batches_of(comm, "contiguous")
    attend_batch(comm, first)
    pack = PackDocuments(4, 0, (4, 2), layout="contiguous", head_dim=8, costs=comm.costs)
    of_four = pack([[1] * 10, [1] * 22])
    with pytest.raises(ArgumentError, match="is for 4 ranks, but the group has 2"):
        attend_batch(comm, of_four, tokens=32)
    attend_batch(four, of_four, tokens=32)
    with pytest.raises(ArgumentError, match="is for 4 ranks, but the group has 2"):
        attend_batch(comm, second, layout=of_four.layout)
    attend_batch(comm, second, max_seqlen_q=7, max_seqlen_k=7)
    with pytest.raises(ArgumentError, match="max_seqlen_q=7, but the longest document has 16"):
        attend_batch(comm, third, max_seqlen_q=7, max_seqlen_k=7)
    with counted() as times:
        attend_batch(comm, last, keys=last.cu_seqlens.clone())
    assert times["make_plan"] == 1, "keys may have other lengths"


def test_two_models_of_a_batch_have_plans_of_their_own(afresh: None) -> None:
    """The batch was planned for one of them."""
    comm = FakeComm(0, 2)
    first, second, *_ = batches_of(comm, "balanced")
    for batch in (first, second):
        attend_batch(comm, batch)
        with counted() as times, pytest.warns(UserWarning, match=r"for heads=\(4, 2\)"):
            attend_batch(comm, batch, heads=(2, 2, 2, 2))
        assert times["make_plan"] == 1


def test_a_layout_of_keys_is_not_the_next_call_s(afresh: None) -> None:
    comm = FakeComm(0, 2)
    first, second, *_ = batches_of(comm, "balanced")
    attend_batch(comm, first, k_layout=first.layout)
    attend_batch(comm, second)
    *_, bound = bind.bound_calls(comm_by_name(comm.name)).values()
    assert (bound.call.options.layout, bound.call.options.k_layout) == (second.layout.spec, "")


def test_a_kernel_for_other_shares_of_the_heads_is_chosen_anew(afresh: None) -> None:
    """Of two batches that are asked for alike, ranks may share out the heads in one."""

    def rank(comm: Comm) -> bool:
        batch = batches_of(comm, "contiguous")[0]
        attend_batch(comm, batch)
        bound = next(iter(bind.bound_calls(comm).values()))
        given: Any = {"heads": (4, 2), "head_dim": 8}
        plans = [make_plan(batch.plan.mask, batch.layout, team_size=n, **given) for n in (1, 2)]
        return bound.call.asked_of(plans[0]) != bound.call.asked_of(plans[1])

    assert run_ranks(2, rank) == [True, True]
