"""Megatron's core attention: its constructor, its call, and what it refuses."""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

import megatron_jobs
import pytest
import torch
from megatron_jobs import SINK, config
from ranks import Pool, worlds

from customized_ops.ring_attention import AttnMask
from customized_ops.ring_attention.api.frameworks.megatron import RingCoreAttention

N = 32
CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "bottom right": {"arguments": {"attn_mask_type": "causal_bottom_right"}},
    "no mask": {"mask": AttnMask.full(N, N), "arguments": {"attn_mask_type": "no_mask"}},
    "no mask in the call": {"mask": AttnMask.full(N, N), "call": {"attn_mask_type": "no_mask"}},
    "scale and wide values": {
        "dims": (8, 12),
        "arguments": {"softmax_scale": 0.5, "k_channels": 8, "v_channels": 12},
    },
    "window": {
        "mask": AttnMask.sliding_window(N, 5, 0),
        "of_config": {"window_size": (5, 0), "deterministic_mode": True},
    },
    "window of other layers": {
        "of_config": {"window_size": (5, 0), "window_attn_skip_freq": 2},
    },
    "window of listed layers": {
        "mask": AttnMask.sliding_window(N, 5, 0),
        "of_config": {"window_size": (5, 0), "window_attn_skip_freq": [0, 1]},
    },
    "off by one": {"sink": (0.0,) * 4, "of_config": {"softmax_type": "off-by-one"}},
    "learnable": {"sink": SINK, "of_config": {"softmax_type": "learnable"}},
}


class AttnMaskType(enum.Enum):
    """As Megatron's."""

    causal = 2
    padding = 1


@worlds(cpus=[2, 4], gpus=[2, 4])
def test_equals_dense_attention(ranks: Pool) -> None:
    for name, case in CASES.items():
        full = {"mask": AttnMask.causal(N), "dims": (8, 8), "sink": None, "of_config": {}}
        full |= {"arguments": {}, "call": {}, **case}
        for far in ranks.run(megatron_jobs.far, *full.values()):
            assert len(far) == 4 + (name == "learnable")
            assert all(far[what] < 1e-10 for what in far), (name, far)


def layer(of_config: dict[str, Any] | None = None, **given: Any) -> RingCoreAttention:
    arguments = {"attn_mask_type": AttnMaskType.causal, "attention_type": "self", **given}
    return RingCoreAttention(config(**(of_config or {})), 1, **arguments)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout=0.1: it needs a seed"),
        ({"of_config": {"attention_dropout": 0.1}}, "attention_dropout=0.1: it needs a seed"),
        ({"attention_type": "cross"}, "attention_type='cross': keys are the queries' tokens"),
        ({"attn_mask_type": AttnMaskType.padding}, "attn_mask_type='padding': there are causal"),
        ({"num_splits": 4}, "num_splits=4: the plan cuts the work"),
        ({"cp_comm_type": "a2a"}, "cp_comm_type='a2a': the plan decides what moves"),
        ({"of_config": {"qk_clip": True}}, "config.qk_clip=True"),
        ({"of_config": {"softmax_type": "other"}}, "config.softmax_type='other'"),
    ],
)
def test_what_the_constructor_refuses(given: dict[str, Any], says: str) -> None:
    with pytest.raises(NotImplementedError) as error:
        layer(**given)
    assert says in str(error.value)


def test_ranks_need_a_group() -> None:
    with pytest.raises(ValueError, match="2 ranks need a pg_collection with cp"):
        layer({"context_parallel_size": 2})


def packed(**given: Any) -> SimpleNamespace:
    """Megatron's PackedSeqParams."""
    plain = dict.fromkeys(("cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"))
    plain |= {"qkv_format": "thd", "cu_seqlens_q": [0, 2, 4], "cp_group": None}
    return SimpleNamespace(**{**plain, **given})


PACKED = {
    "causal": ({}, {"cu_seqlens_q": [0, 8, 24, 40]}, (0, 8, 24, 40)),
    "padded": ({}, {"cu_seqlens_q_padded": [0, 8, 40]}, (0, 8, 40)),
    "all tokens of each": (
        {"attn_mask_type": "padding"},
        {"cu_seqlens_q": [0, 16, 24]},
        (0, 16, 24),
    ),
}


@worlds(cpus=[2], gpus=[2])
def test_packed_sequences_equal_dense_attention(ranks: Pool) -> None:
    for call, params, bounds in PACKED.values():
        mask = AttnMask.varlen(bounds, causal=not call)
        full = [mask, bounds, {**call, "packed_seq_params": packed(**params)}]
        for far in ranks.run(megatron_jobs.far_packed, *full):
            assert len(far) == 4 and max(far.values()) < 1e-10, far


def test_packed_sequences_are_divided_by_the_ranks(two_ranks: Pool) -> None:
    for said in two_ranks.run(megatron_jobs.refused, packed(cu_seqlens_q=[0, 6, 8])):
        assert "sequences of [6, 2] tokens" in said
        assert "pad each to a multiple of 4 for 2 ranks" in said


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "attention_mask='Tensor': leave it out"),
        ({"attention_bias": torch.ones(1)}, "attention_bias='Tensor'"),
        ({"packed_seq_params": packed(qkv_format="sbhd")}, "packed_seq_params.qkv_format='sbhd'"),
        ({"packed_seq_params": packed(cu_seqlens_kv=[0, 3, 4])}, "packed_seq_params.cu_seqlens_kv"),
        ({"packed_seq_params": packed(cu_seqlens_kv=[0, 4])}, "packed_seq_params.cu_seqlens_kv"),
        ({"packed_seq_params": packed(cp_group="other")}, "packed_seq_params.cp_group='other'"),
        (
            {"packed_seq_params": packed(cu_seqlens_q_padded=[0, 4]), "attn_mask_type": "padding"},
            "packed_seq_params.cu_seqlens_q_padded='list'",
        ),
        ({"attn_mask_type": "arbitrary"}, "attn_mask_type='arbitrary'"),
        ({"num_splits": 2}, "num_splits=2"),
    ],
)
def test_what_a_call_refuses(given: dict[str, Any], says: str) -> None:
    q = torch.randn(4, 1, 4, 8)
    with pytest.raises(NotImplementedError) as error:
        layer()(q, q, q, **{"attention_mask": None, **given})
    assert says in str(error.value)


def test_channels_are_those_of_the_tensors() -> None:
    q = torch.randn(4, 1, 4, 8)
    with pytest.raises(ValueError, match=r"value \(4, 1, 4, 8\) has no dim 16"):
        layer(v_channels=16)(q, q, q, None)
