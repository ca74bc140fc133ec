"""``warm_up`` makes what a training may meet, on every rank, for any options."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from compiling_kernel import CompilingKernel

from customized_ops.ring_attention import (
    AttnMask,
    CostModel,
    KernelError,
    Layout,
    compiled_kernels,
    run_ranks,
    warm_up,
    wrap_ring_attn_varlen_func,
)
from customized_ops.ring_attention.core.kernels import KERNELS
from customized_ops.ring_attention.core.plan.cost_model import H200, H200_NCCL
from customized_ops.ring_attention.warm_up import _request, learn_costs

HEADS, DIM = (4, 2), 8
KIND: dict[str, Any] = {"heads": HEADS, "head_dim": DIM, "dtype": torch.float32, "device": "cpu"}
# Ranks, options of attention, head dim of v, and kinds that are compiled: a forward and a backward
# for each number of query heads to a key head that a rank may have: one in a team of more ranks
# than the two key heads, and two otherwise.
CASES: list[tuple[int, dict[str, Any], int, int]] = [
    (1, {}, 4, 2),
    (2, {"window_size": (9, 0), "return_lse": True}, DIM, 2),
    (3, {"causal": False, "softcap": 3.0, "deterministic": True}, DIM, 4),
    (4, {}, DIM, 4),
    (4, {"team_size": 2}, DIM, 2),
    (4, {"team_size": 4}, DIM, 2),
    (4, {"window_size": (9, 0)}, DIM, 4),
]


@pytest.mark.thin(4)
@pytest.mark.filterwarnings("ignore:Layout.balanced")
@pytest.mark.usefixtures("balanced_once")
@pytest.mark.parametrize(("ranks", "options", "v_dim", "kinds"), CASES, ids=str)
def test_no_documents_need_a_kernel_after_it(
    ranks: int, options: dict[str, Any], v_dim: int, kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their lengths, and in whatever teams ranks share out heads."""
    kernel = CompilingKernel()
    monkeypatch.setitem(KERNELS, kernel.NAME, kernel)
    how = {"kernel": kernel.NAME, **options}
    teams = [n for n in range(1, 5) if ranks % n == 0]
    teams = [options["team_size"]] if "team_size" in options else teams

    def train(comm: Any) -> None:
        draw = np.random.default_rng(1)
        for n in range(6):  # each size of team with each layout
            ends = np.cumsum(draw.integers(0, 30, draw.integers(1, 6)) + 1)
            given = {"causal": True} | how | {"team_size": teams[n % len(teams)]}
            mask = AttnMask.varlen(
                [0, *ends], causal=given["causal"], window=given.get("window_size", (-1, -1))
            )
            layout = (Layout.balanced(mask, ranks), Layout.contiguous(mask.q_len, ranks))[n % 2]
            rows, cu = layout.sizes[comm.rank], [0, *ends.tolist()]
            q, k, v = (
                torch.zeros(rows, h, d).requires_grad_()
                for h, d in ((HEADS[0], DIM), (HEADS[1], DIM), (HEADS[1], v_dim))
            )
            where = {"process_group": comm, "layout": layout}
            out = wrap_ring_attn_varlen_func(q, k, v, cu, cu, **given, **where)
            sum(each.sum() for each in (out if isinstance(out, tuple) else (out,))).backward()

    def warmed(comm: Any) -> int:
        return warm_up(48, process_group=comm, **KIND, v_dim=v_dim, **how)

    before = compiled_kernels()
    made = run_ranks(ranks, warmed)
    assert compiled_kernels() - before == len(kernel.kinds) == kinds
    assert max(made) == kinds if ranks == 1 else 0 <= max(made) <= kinds
    assert run_ranks(ranks, warmed) == [0] * ranks
    assert kernel.windows == {"window_size" in options}
    run_ranks(ranks, train)
    assert len(kernel.kinds) == kinds


@pytest.mark.parametrize("known", [H200, H200_NCCL], ids=["writes", "messages"])
def test_what_a_call_costs_the_host(known: CostModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans assume 200 us, and are told of twice that or more on any rank, as all ranks are. A
    batch of messages then costs as many times more."""
    given = [torch.zeros(1, 64, h, DIM) for h in (4, 2, 2)]
    sleeping = SimpleNamespace(**vars(KERNELS["torch"]))
    name = f"sleeping {known.batch_seconds}"  # what was chosen by a name is kept

    def slow(*args: Any) -> Any:
        time.sleep(delays[mine.rank])
        return KERNELS["torch"].forward(*args)

    def told(comm: Any) -> CostModel:
        mine.rank, comm.costs = comm.rank, known
        learn_costs(comm, given, {"kernel": name})
        return comm.costs

    sleeping.forward, mine, delays = slow, threading.local(), [0.0, 0.0]
    monkeypatch.setitem(KERNELS, name, sleeping)
    for late, least in ((0.0, 1), (0.0041, 8)):  # in one of two calls
        delays[1] = late
        first, second = run_ranks(2, told)
        assert first == second
        times = first.call_seconds / H200.call_seconds
        assert times >= least and math.log2(times).is_integer()
        assert first.batch_seconds == times * known.batch_seconds
        assert first.message_seconds == times * known.message_seconds
        names = "call_seconds", "batch_seconds", "message_seconds"
        assert replace(first, **{name: getattr(known, name) for name in names}) == known


def test_a_host_whose_call_fails_is_told_of() -> None:
    given = [torch.zeros(1, 64, h, DIM) for h in (4, 2, 2)]

    def rank(comm: Any) -> None:
        learn_costs(comm, given, {"kernel": "flash4" if comm.rank else "torch"})

    with pytest.raises(KernelError, match="warm_up: kernel 'flash4' cannot do this"):
        run_ranks(2, rank)


def test_the_kernel_that_is_measured_is_that_of_the_options() -> None:
    given = [torch.zeros(1, 64, h, DIM) for h in (4, 2, 2)]
    asked = {"window_size": (9, 0), "return_lse": True, "softcap": 3.0, "dropout_p": 0.0}
    request = _request(given, asked)
    assert request.features == ("softcap", "window", "lse gradient")
    assert (request.shape_class, request.q_heads, request.kv_heads) == ("window", 4, 2)


def test_on_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert warm_up(48, heads=HEADS, head_dim=DIM) == 0


def test_what_the_op_refuses() -> None:
    with pytest.raises(ValueError, match="kernel"):
        warm_up(48, **KIND, kernel="flash5")


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": 64.5},
        {"heads": 4},
        {"head_dim": "64"},
        {"v_dim": 0},
        {"dtype": "bfloat16"},
        {"layout": "zigzag"},
        {"window_size": 4},
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(wrong: Any) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"warm_up: {name} must be .*, got {value!r}"):
        warm_up(**{"tokens": 48, **KIND, **wrong})
