"""What windowed attention moves: at most the halo, and what the plan says, byte for byte."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from op_cases import Case, run_rank
from torch import Tensor

from customized_ops.ring_attention import Plan, make_plan, run_ranks
from customized_ops.ring_attention.core.comm import Comm


def counted(case: Case, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes [P, 2] that each rank sends and receives in the forward, and in the backward."""

    def of_rank(comm: Comm) -> list[list[int]]:
        layout = case.layout_of(ranks)
        mine = [layout.shard(t, comm.rank, 0 if case.packed else 1) for t in case.tensors()]
        leaves = [t.detach().requires_grad_() for t in mine[:3]]
        out, _ = case.call(*leaves, process_group=comm, layout=layout)
        forward = [comm.counters.sent_bytes, comm.counters.received_bytes]
        torch.autograd.grad(out, leaves, mine[3])
        both = [comm.counters.sent_bytes, comm.counters.received_bytes]
        return [forward, [b - f for b, f in zip(both, forward, strict=True)]]

    traffic = np.array(run_ranks(ranks, of_rank))
    return traffic[:, 0], traffic[:, 1]


def plan_of(case: Case, ranks: int) -> Plan:
    return make_plan(
        case.mask(), case.layout_of(ranks), assignment="owner", heads=case.heads, team_size=1
    )


def halo_tokens(case: Case) -> int:
    """Keys that a rank may need beyond its own."""
    left, right = case.window
    if "streaming" in case.op:
        return left + case.sink_tokens * max(1, len(case.cu_seqlens) - 1)
    return left + (0 if case.causal else right)


def needed_elsewhere(case: Case, ranks: int) -> list[int]:
    """Keys that each rank's rows attend and that it does not hold, counted in the dense mask."""
    dense, counts = case.mask().to_dense(), []
    for start, stop in pairwise(np.cumsum([0, *case.layout_of(ranks).sizes])):
        needed = dense[start:stop].any(0)
        counts.append(int(needed.sum() - needed[start:stop].sum()))
    return counts


def kv_bytes(case: Case) -> int:
    """Of one token's key and value, over the batch."""
    return case.batch * case.heads[1] * sum(case.dims) * torch.finfo(case.dtype).bits // 8


def check(case: Case, ranks: int) -> np.ndarray:
    """The traffic is the plan's and no more than the halo; returns tokens received, [P]."""
    forward, backward = counted(case, ranks)
    sizes = (*case.heads, *case.dims, torch.finfo(case.dtype).bits // 8)
    plan = plan_of(case, ranks)
    assert (forward == case.batch * plan.forward_bytes(*sizes)).all()
    # lse may be used, so its gradient goes with rows that move; here none do.
    assert (backward == case.batch * plan.backward_bytes(*sizes, lse_gradient=True)).all()
    each = kv_bytes(case)
    assert (forward[:, 1] <= halo_tokens(case) * each).all(), (forward[:, 1] / each).tolist()
    assert forward[:, 0].sum() == forward[:, 1].sum()
    assert (forward[:, 1] % each == 0).all()
    return forward[:, 1] // each


BASE = Case("window", 64, heads=(4, 2), dims=(4, 3), batch=2, causal=True)
WINDOWS = {
    "short": replace(BASE, window=(3, 0)),
    "of one token": replace(BASE, window=(1, -1)),
    "as long as a shard of 8": replace(BASE, window=(8, 0)),
    "over several shards": replace(BASE, window=(21, 0)),
    "both sides": replace(BASE, causal=False, window=(5, 3)),
    "both sides, over several shards": replace(BASE, causal=False, window=(19, 23)),
    "to the right only": replace(BASE, causal=False, window=(0, 7)),
    "longer than the sequence": replace(BASE, window=(100, 0)),
    "bf16, one key head": replace(BASE, window=(11, 0), dtype=torch.bfloat16, heads=(4, 1)),
    "odd length": replace(BASE, length=61, window=(9, 0)),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_moves_the_halo(name: str, ranks: int) -> None:
    case = WINDOWS[name]
    received = check(case, ranks)
    bounds = np.cumsum([0, *case.layout_of(ranks).sizes])
    left, right = case.window[0], 0 if case.causal else case.window[1]
    for got, (start, stop) in zip(received, pairwise(bounds), strict=True):
        wanted = min(left, start) + min(right, case.length - stop) if stop > start else 0
        assert got == wanted


@pytest.mark.parametrize(
    "sizes", [(64, 0, 0, 0), (1, 62, 1, 0), (0, 3, 50, 11), (2, 2, 2, 58)], ids=str
)
@pytest.mark.parametrize("window", [(4, 0), (40, 0), (7, 9)])
def test_uneven_shards(sizes: tuple[int, ...], window: tuple[int, int]) -> None:
    check(replace(BASE, sizes=sizes, window=window, causal=window[1] == 0), 4)


DOCUMENTS = (0, 9, 10, 10, 30, 33, 64)
PACKED = replace(BASE, op="packed window", batch=1, cu_seqlens=DOCUMENTS)


@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("window", [(2, 0), (12, 0), (5, 6)])
def test_documents_cut_the_halo(window: tuple[int, int], ranks: int) -> None:
    case = replace(PACKED, window=window, causal=window[1] == 0)
    received = check(case, ranks)
    whole = check(replace(case, op="window", cu_seqlens=()), ranks)
    assert (received <= whole).all()
    assert received.tolist() == needed_elsewhere(case, ranks)


def test_documents_that_end_at_shards_move_nothing() -> None:
    case = replace(PACKED, cu_seqlens=(0, 16, 32, 40, 48, 64), window=(15, 0))
    assert check(case, 4).tolist() == [0, 0, 0, 0]
    assert check(case, 2).tolist() == [0, 0]


STREAMING = replace(BASE, op="streaming", window=(5, -1), sink_tokens=3)


@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("window", "sinks"), [(5, 3), (0, 1), (20, 10), (4, 0), (30, 30)])
def test_streaming_moves_the_window_and_the_sinks(ranks: int, window: int, sinks: int) -> None:
    case = replace(STREAMING, window=(window, -1), sink_tokens=sinks)
    received = check(case, ranks)
    bounds = np.cumsum([0, *case.layout_of(ranks).sizes])
    for got, start in zip(received, bounds[:-1], strict=True):
        assert got == min(start, window + min(sinks, max(0, start - window)))


@pytest.mark.parametrize("sizes", [(0, 60, 4, 0), (1, 1, 31, 31)], ids=str)
def test_streaming_over_uneven_shards(sizes: tuple[int, ...]) -> None:
    check(replace(STREAMING, sizes=sizes), 4)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_streaming_over_documents(ranks: int) -> None:
    case = replace(STREAMING, op="packed streaming", batch=1, cu_seqlens=DOCUMENTS)
    received = check(case, ranks)
    assert received.tolist() == needed_elsewhere(case, ranks)
    bounds = np.cumsum([0, *case.layout_of(ranks).sizes])
    for got, (start, stop) in zip(received, pairwise(bounds), strict=True):
        # The sinks of the documents that the rank has tokens of, no others.
        documents = sum(a < stop and b > start for a, b in pairwise(DOCUMENTS))
        assert got <= 5 + 3 * documents


def test_a_window_computes_what_the_ring_does() -> None:
    """The same tokens through the ring op, which may give rows away, compute the same."""
    window = replace(BASE, window=(6, 0))
    ring = replace(window, op="ring")

    def results(case: Case) -> list[list[Tensor]]:
        return run_ranks(4, lambda comm: run_rank(case, comm.rank, 4, comm))

    for a, b in zip(results(window), results(ring), strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)
