"""What does not fit is refused before anything is sent, on every rank, and says what would."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from linear_cases import LinearCase

from customized_ops.along_sequence import segments_of
from customized_ops.along_sequence.arguments import facts_of
from customized_ops.causal_conv1d import wrap_causal_conv1d_func
from customized_ops.linear_attention import wrap_gated_delta_rule_func, wrap_gated_linear_attn_func
from customized_ops.ring_attention import DisagreementError, Layout, run_ranks
from customized_ops.ring_attention.core.comm.inprocess import InProcessComm

CASE = LinearCase(6, states="")
STATE = torch.zeros(1, 2, 3, 2, dtype=torch.float64)
GIVEN = {name: t.detach() for name, t in CASE.given.items()}
CONV = {"x": torch.randn(2, 6, 3), "weight": torch.randn(3, 4)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": [1.0]}, "q must be a tensor, got list"),
        ({"v": GIVEN["v"].float()}, "v is torch.float32 but q is torch.float64; give torch.float6"),
        ({"beta": GIVEN["beta"].long()}, "beta must be floating point, got torch.int64"),
        ({"beta": GIVEN["beta"].half()}, "give torch.float64 or torch.float32"),
        ({"k": GIVEN["k"].to("meta")}, "k is on meta but q is on cpu"),
        ({"k": GIVEN["k"][:, 1:]}, "'l' = 6 from dim 1 of q"),
        ({"q": GIVEN["q"].expand(2, 6, 3, 3)}, "the heads of v must be a multiple of those of q"),
        ({"g": GIVEN["g"].unsqueeze(-1)}, "dim 3 of g is 'dk' = 3"),
        ({"g": GIVEN["g"][0]}, "g is annotated as 3 dims"),
        ({"scale": "1"}, "scale must be a finite number or None, got '1'"),
        ({"initial_state": torch.zeros(1, 2, 3, 2).double()}, "dim 0 of initial_state is 'b' = 2"),
        ({"output_final_state": 2}, "output_final_state must be True or False, got 2"),
        ({"cu_seqlens": [0, 6]}, "with cu_seqlens the batch is 1"),
        ({"cu_seqlens": "all"}, "cu_seqlens must be integers"),
        ({"layout": "zigzag"}, "layout must be a Layout or None, got 'zigzag'"),
        ({"layout": Layout.contiguous(7, 1)}, "holds 6 tokens, but layout contiguous:7:1"),
        ({"layout": Layout.contiguous(6, 2)}, "is for 2 ranks, but the group has 1"),
        ({"kernel": None}, "kernel must be the name of one, or 'auto', got None"),
        ({"process_group": "all"}, "process_group must be a torch.distributed.ProcessGroup"),
    ],
)
def test_bad_arguments(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        wrap_gated_delta_rule_func(**{**GIVEN, **changed})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1, 6], "cu_seqlens must start at 0"),
        ([0, 4, 3, 6], "cu_seqlens must not fall"),
        ([0, 4], "cu_seqlens ends at 4 but there are 6 tokens"),
    ],
)
def test_bad_lengths(lengths: list[int], message: str) -> None:
    given = {name: t[:1] for name, t in GIVEN.items() if name != "beta"}
    with pytest.raises(ValueError, match=message):
        wrap_gated_linear_attn_func(**given, cu_seqlens=lengths)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight": torch.randn(4, 4)}, "'d' = 3 from dim 2 of x"),
        ({"weight": torch.randn(3, 0)}, "w of 1 or more, got (3, 0)"),
        ({"weight": torch.randn(3, 1, 4)}, "must be [d, w] (of nn.Conv1d its .squeeze(1)), w of 1"),
        ({"bias": torch.randn(3).double()}, "bias is torch.float64 but x is torch.float32"),
        ({"activation": "gelu"}, "activation must be None, 'silu' or 'swish', got 'gelu'"),
        ({"activation": ""}, "activation must be None"),
        ({"x": torch.randn(6, 3)}, "x is annotated as 3 dims"),
    ],
)
def test_bad_convolutions(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        wrap_causal_conv1d_func(**{**CONV, **changed})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scale": 2.0}, "scale"),
        ({"cu_seqlens": [0, 3, 4], "initial_state": STATE.expand(2, 2, 3, 2)}, "cu_seqlens"),
        ({"output_final_state": True}, "output_final_state"),
        ({"initial_state": 1 + STATE}, "initial_state"),
        ({"initial_state": None}, "initial_state"),
        ({"layout": Layout.from_sizes([1, 3])}, "refused on another rank"),
        ({"q": GIVEN["q"][:1, :2].float()}, "refused on another rank"),
        ({"kernel": "torch"}, "kernel"),
    ],
)
def test_ranks_that_disagree(changed: dict[str, Any], message: str) -> None:
    """Every rank raises, and nothing was sent."""

    def rank(comm: InProcessComm) -> str:
        given = {name: t[:1, :2] for name, t in GIVEN.items()}
        told = {"cu_seqlens": [0, 4], "process_group": comm, "initial_state": STATE}
        with pytest.raises(ValueError) as error:
            wrap_gated_delta_rule_func(**{**given, **told, **(changed if comm.rank else {})})
        assert comm.counters.sent_bytes == 0
        return f"{type(error.value).__name__}: {error.value}"

    first, second = run_ranks(2, rank)
    assert message in first and first.startswith(DisagreementError.__name__)
    assert second  # its own problem, or the same


def test_convolutions_that_disagree() -> None:
    def rank(comm: InProcessComm) -> str:
        with pytest.raises(DisagreementError) as error:
            width = 3 + comm.rank
            wrap_causal_conv1d_func(CONV["x"], torch.randn(3, width), process_group=comm)
        with pytest.raises(DisagreementError) as other:
            filter_ = torch.randn(3, 4, dtype=(torch.float32, torch.bfloat16)[comm.rank])
            wrap_causal_conv1d_func(CONV["x"].bfloat16(), filter_, process_group=comm)
        return f"{error.value} {other.value}"

    assert all("weight" in said and "(3, 4) torch.bf" in said for said in run_ranks(2, rank))


def test_unequal_shares_of_the_tokens() -> None:
    """Without a layout each rank takes its own number for everybody's."""

    def rank(comm: Any) -> str:
        mine = {name: t[:, : 3 + comm.rank] for name, t in GIVEN.items()}
        with pytest.raises(DisagreementError) as error:
            wrap_gated_delta_rule_func(**mine, process_group=comm)
        return str(error.value)

    for said in run_ranks(2, rank):
        assert "[3, 3]" in said and "[4, 4]" in said and "cu_seqlens" not in said
        assert said.endswith("with layout=Layout.from_sizes([...]), all of them alike")


def test_all_tokens_in_place_of_a_rank_s_own() -> None:
    where = {"layout": Layout.zigzag(6, 2)}

    def rank(comm: Any) -> str:
        with pytest.raises(ValueError, match=r"give this rank's own: layout.shard\(x, rank\)"):
            wrap_gated_delta_rule_func(**GIVEN, **where, process_group=comm)
        return ""

    run_ranks(2, rank)


def test_lengths_that_are_not_of_all_ranks() -> None:
    given = {name: t[:1, :3] for name, t in GIVEN.items() if name != "beta"}

    def rank(comm: Any) -> str:
        with pytest.raises(ValueError) as error:
            wrap_gated_linear_attn_func(**given, cu_seqlens=[0, 4], process_group=comm)
        return str(error.value)

    for said in run_ranks(2, rank):
        assert "cu_seqlens speak of 4 tokens in all; let these be of all ranks' tokens" in said


def test_what_ranks_compare_is_shown() -> None:
    """A long list by its start and a hash."""
    layout = Layout.contiguous(60, 2)
    short = facts_of(segments_of(layout, np.array([0, 7, 60])), {})
    assert short["cu_seqlens"] == "[0, 7, 60]" and short["layout"] == "contiguous:60:2"
    ends = [np.array([0, *range(1, 40), last, 60]) for last in (40, 41)]
    one, other = (facts_of(segments_of(layout, each), {})["cu_seqlens"] for each in ends)
    assert one.startswith("[0, 1, 2, 3,") and one != other and len(one) < 100
