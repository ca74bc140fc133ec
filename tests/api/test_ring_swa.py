"""The functions of ring_swa over this package's attention, against dense attention."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from dense import dense_gradients
from op_cases import check_dense, cut, expected, run_rank, same
from rank_groups import Groups, comms, device_of, whole
from ranks import Pool, worlds
from refusals import refusals
from swa_cases import FUNCTIONS, SwaCase
from verdicts import check as check_ranks

from customized_ops.ring_attention import AttnMask

DOCUMENTS = (0, 3, 3, 4, 30, 41)
CASES = {
    "window": SwaCase("window", 32, window=(5, 0), heads=(4, 2), batch=2),
    "wider than a rank's tokens": SwaCase("window", 24, window=(17, 0), heads=(6, 2)),
    "itself alone": SwaCase("window", 24, window=(0, 0)),
    "unbounded": SwaCase("window", 24, window=(-1, 0)),
    "window, uneven": SwaCase("window", 27, window=(6, 0), layout="zigzag", heads=(4, 1)),
    "documents": SwaCase("packed window", 41, window=(6, 0), cu_seqlens=DOCUMENTS, heads=(4, 2)),
    "first token": SwaCase("streaming", 32, window=(5, 0), sink_tokens=1, heads=(4, 2), batch=3),
    "first tokens": SwaCase("streaming", 24, window=(3, 0), sink_tokens=4, dims=(8, 6)),
    "first token alone": SwaCase("streaming", 24, window=(0, 0), sink_tokens=1),
    "first of each": SwaCase(
        "packed streaming", 41, window=(6, 0), sink_tokens=1, cu_seqlens=DOCUMENTS, heads=(8, 2)
    ),
}


@pytest.mark.thin(3)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_equals_dense(name: str, ranks: int) -> None:
    case = replace(CASES[name], told=ranks % 2 == 0)
    check_dense(case, ranks)


@pytest.mark.parametrize("name", CASES)
def test_no_group_is_one_device(name: str) -> None:
    case = replace(CASES[name], layout=None)
    same(run_rank(case, 0, 1, None), expected(case))


def test_every_entry_of_a_batch_has_a_first_token_of_its_own() -> None:
    """There the first token of one stands for all: results and gradients would differ."""
    case = CASES["first token"]
    q, k, v, dout = case.tensors()
    as_there = [t.clone() for t in (k, v)]
    for t in as_there:
        t[:, :1] = t[:1, :1]
    mask = AttnMask.streaming(32, 5, 1)
    other = dense_gradients(q, *as_there, mask, q.shape[-1] ** -0.5, dout)[0]
    ours = cut(case, 2)[0]
    assert (ours[0] - other[0]).abs().max() < 1e-10
    assert (ours[1:] - other[1:]).abs().max() > 1e-2


def on(ranks: Pool, **others: Any) -> dict[str, SwaCase]:
    changed = {"device": device_of(ranks), "told": True, **others}
    return {n: replace(c, **changed) for n, c in CASES.items()}


@worlds(cpus=[2, 4], gpus=[2, 4])
def test_over_process_groups(ranks: Pool) -> None:
    ways = [Groups(whole(ranks.size), comm) for comm in ("ranks", *comms(ranks))]
    assert not check_ranks(ranks, [on(ranks)], ways)


@worlds(cpus=[4], gpus=[4])
def test_in_a_group_that_is_not_the_world(ranks: Pool) -> None:
    """Whose ranks have other numbers in the world."""
    rows = ((1, 3), (0, 2))
    ways = [Groups(rows, comm) for comm in ("ranks", *comms(ranks))]
    assert not check_ranks(ranks, [on(ranks)] * 2, ways)


@worlds(cpus=[2], gpus=[2, 4])
def test_in_bf16(ranks: Pool) -> None:
    cases = on(ranks, dtype=torch.bfloat16, dims=(64, 64), heads=(8, 2))
    assert not check_ranks(ranks, [cases], [Groups(whole(ranks.size), comms(ranks)[-1])])


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"cp_size": 3}, "cp_size=3, but in cp_group it is 2, where rank n holds the n-th part"),
        ({"cp_local_rank": 2}, "cp_local_rank=2, but in cp_group it is"),
        ({"cp_prev_global_rank": 5}, "cp_prev_global_rank=5, but in cp_group it is"),
        ({"cp_next_global_rank": 5}, "cp_next_global_rank=5, but in cp_group it is"),
        ({"window_size": -2}, "window_size must be a number of tokens, 0 or more, got -2"),
        ({"window_size": 2.5}, "window_size must be a number of tokens, 0 or more, got 2.5"),
    ],
)
@pytest.mark.parametrize("op", FUNCTIONS)
def test_what_is_refused(op: str, told: dict[str, Any], message: str) -> None:
    def call(comm: Any) -> None:
        x = torch.zeros(4, 2, 8) if "packed" in op else torch.zeros(1, 4, 2, 8)
        given = {"window_size": 3, "cp_group": comm, **told}
        given |= {"cu_seqlens": [0, 8]} if "packed" in op else {}
        FUNCTIONS[op](x, x, x, **given)

    for said in refusals(2, call):
        assert re.search(re.escape(f"{FUNCTIONS[op].__name__}: {message}"), said), said
