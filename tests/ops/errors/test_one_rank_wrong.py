"""Arguments that are wrong on one rank stop all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from annotations.consistency import check_setting
from annotations.waiting import patience
from customized_ops.ring_attention import (
    Layout,
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
    wrap_sliding_window_attn_func,
    wrap_streaming_attn_func,
    wrap_zigzag_attn_func,
)

from .error_cases import PK, PQ, K, Q, said_by_ranks


def test_an_unsupported_argument_on_one_rank_stops_all() -> None:
    def call(comm: Any) -> None:
        wrap_zigzag_attn_func(Q, K, K, process_group=comm, return_attn_probs=comm.rank == 1)

    first, second = said_by_ranks(2, call)
    assert second.startswith("NotImplementedError: wrap_zigzag_attn_func: return_attn_probs=True")
    assert "rank 1: wrap_zigzag_attn_func: return_attn_probs=True is not supported yet" in first


def test_different_cu_seqlens_stop_all() -> None:
    def call(comm: Any) -> None:
        cu = [0, 16] if comm.rank else [0, 4, 16]
        wrap_ring_attn_varlen_func(PQ, PK, PK, cu, cu, causal=True, process_group=comm)

    first, second = said_by_ranks(2, call)
    assert first == second
    assert "do not agree" in first


WRONG_ON_ONE_RANK: dict[str, tuple[Any, str]] = {
    "a cu_seqlens is missing": (
        lambda wrong: (
            lambda comm: wrap_sliding_window_attn_func(
                PQ, PK, PK, [0, 16], None if wrong else [0, 16], process_group=comm
            )
        ),
        "wrap_sliding_window_attn_func: cu_seqlens_k is missing",
    ),
    "both cu_seqlens are missing from a packed op": (
        lambda wrong: (
            lambda comm: wrap_ring_attn_varlen_func(
                PQ, PK, PK, *[None if wrong else [0, 16]] * 2, process_group=comm
            )
        ),
        "wrap_ring_attn_varlen_func: cu_seqlens_q is missing",
    ),
    "max_seqlen without cu_seqlens": (
        lambda wrong: (
            lambda comm: wrap_sliding_window_attn_func(
                Q, K, K, max_seqlen_q=8 if wrong else None, process_group=comm
            )
        ),
        "wrap_sliding_window_attn_func: max_seqlen_q goes with cu_seqlens_q and cu_seqlens_k",
    ),
    "enable_ring of a dense op": (
        lambda wrong: (
            lambda comm: wrap_sliding_window_attn_func(
                Q, K, K, enable_ring=[] if wrong else True, process_group=comm
            )
        ),
        "wrap_sliding_window_attn_func: enable_ring must be True or False, got []",
    ),
    "enable_ring of a packed op": (
        lambda wrong: (
            lambda comm: wrap_ring_attn_varlen_func(
                PQ,
                PK,
                PK,
                [0, 16],
                [0, 16],
                enable_ring=None if wrong else True,
                process_group=comm,
            )
        ),
        "wrap_ring_attn_varlen_func: enable_ring must be True or False, got None",
    ),
    "window": (
        lambda wrong: (
            lambda comm: wrap_streaming_attn_func(
                Q, K, K, -2 if wrong else 2, 1, process_group=comm
            )
        ),
        "wrap_streaming_attn_func: window (-1: unbounded) must be a number of tokens",
    ),
    "kernel": (
        lambda wrong: (
            lambda comm: wrap_ring_attn_func(
                Q, K, K, kernel=None if wrong else "auto", process_group=comm
            )
        ),
        "wrap_ring_attn_func: kernel must be the name of one, or 'auto', got None",
    ),
}


@pytest.mark.parametrize("name", WRONG_ON_ONE_RANK)
def test_an_argument_wrong_on_one_rank_stops_all_in_check_mode(name: str) -> None:
    calling, message = WRONG_ON_ONE_RANK[name]
    first, second = said_by_ranks(2, lambda comm: calling(comm.rank == 1)(comm))
    assert second.startswith(f"ArgumentError: {message}")
    assert first.startswith("DisagreementError") and f"rank 1: {message}" in first


@pytest.mark.parametrize(
    ("name", "said", "wanted"),
    [
        ("SEQSHARD_CHECK", "off", "must be 0 or 1, got 'off'"),
        ("SEQSHARD_PATIENCE", "long", "must be a number of seconds, got 'long'"),
    ],
)
def test_what_an_environment_variable_does_not_take(
    name: str, said: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, said)
    read = {"SEQSHARD_CHECK": check_setting, "SEQSHARD_PATIENCE": patience}
    with pytest.raises(ValueError, match=f"{name} {wanted}"):
        read[name]()


@pytest.mark.parametrize(
    ("said", "compares", "asked"),
    [(None, False, False), (None, True, True), ("0", True, False), ("1", False, True)],
)
def test_who_compares_calls(
    said: str | None, compares: bool, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks on CPUs, unless they are told not to."""
    if said is None:
        monkeypatch.delenv("SEQSHARD_CHECK")
    else:
        monkeypatch.setenv("SEQSHARD_CHECK", said)
    gathered = []

    def call(comm: Any) -> None:
        comm.compares, gather = compares, comm.all_gather_object
        comm.all_gather_object = lambda told: gathered.append(told) or gather(told)
        wrap_ring_attn_func(Q, K, K, process_group=comm, layout=Layout.contiguous(16, 2))

    assert said_by_ranks(2, call) == ["no error", "no error"]
    assert bool(gathered) == asked


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"softmax_scale": "x"}, "softmax_scale must be a number or None, got 'x'"),
        ({"layout": "contiguous:16:2"}, "layout must be a Layout, 'balanced' or None"),
        ({"k": None}, "k must be a tensor, got NoneType"),
        ({"window_size": 3}, "window_size must be (left, right)"),
    ],
)
def test_anything_wrong_on_one_rank_stops_all(changed: dict[str, Any], message: str) -> None:
    def call(comm: Any) -> None:
        given = {"q": Q, "k": K, "v": K, **(changed if comm.rank else {})}
        wrap_ring_attn_func(**given, process_group=comm)

    first, second = said_by_ranks(2, call)
    assert message in second
    assert message in first
    assert first.startswith("DisagreementError")


def test_a_layout_is_refused_where_q_and_k_differ_in_total() -> None:
    layout, cu, cu_k = Layout.contiguous(8, 1), [0, 8], [0, 6]
    with pytest.raises(ValueError, match=r"is for q, but cu_seqlens_q end at 8 and .* at 6"):
        wrap_ring_attn_varlen_func(PQ, PK[:6], PK[:6], cu, cu_k, layout=layout)
    both = {"layout": layout, "k_layout": Layout.contiguous(6, 1)}
    wrap_ring_attn_varlen_func(PQ, PK[:6], PK[:6], cu, cu_k, **both)


def test_a_sink_of_another_shape_on_one_rank_stops_all() -> None:
    def call(comm: Any) -> None:
        wrap_ring_attn_func(Q, K, K, process_group=comm, sink=torch.zeros(4 + comm.rank))

    first, second = said_by_ranks(2, call)
    assert second.startswith("ArgumentError: wrap_ring_attn_func: sink must hold a logit for each")
    assert "refused on another rank of the group\nrank 1: wrap_ring_attn_func: sink must" in first
