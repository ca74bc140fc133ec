"""Keys and calls of MagiAttention's names that are refused, and those that are taken."""

from __future__ import annotations

import pytest
import torch
from magi_jobs import Magi, named

from customized_ops.ring_attention import MaskError
from customized_ops.ring_attention.api import magi_attention as magi
from customized_ops.ring_attention.op.arguments import ArgumentError

CASES = named()


def refused(**changes: object) -> str:
    given: dict[str, object] = {
        "q_ranges": [(0, 8)],
        "k_ranges": [(0, 8)],
        "attn_mask_type": "causal",
        "total_seqlen_q": 8,
        "total_seqlen_k": 8,
        "num_heads_q": 4,
        "num_heads_kv": 2,
        "head_dim": 4,
    }
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        magi.magi_attn_flex_key(**{**given, **changes})
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"is_q_permutable": False}, "is_q_permutable=False: keys are for self-attention"),
        ({"total_seqlen_k": 9}, "total_seqlen_q=8 and total_seqlen_k=9 must be equal"),
        ({"attn_mask_type": "casual"}, "types[0] = 'casual' is not known"),
        ({"attn_mask_type": ["full", "full"]}, "must be equally many, got 1, 1 and 2"),
        ({"q_ranges": [(0, 9)]}, "q_ranges"),
        ({"num_heads_q": 3}, "num_heads_q=3 must be a multiple of num_heads_kv=2"),
        ({"head_dim": 0}, "head_dim must be an integer of at least 1"),
        ({"pad_size": -1}, "pad_size must be a number of tokens, got -1"),
        (
            {
                "pad_size": 8,
                "dist_attn_config": magi.DistAttnConfig(magi.DispatchConfig(uneven_shard=True)),
            },
            "uneven_shard=True pads nothing",
        ),
        (
            {"dist_attn_config": magi.DistAttnConfig(magi.DispatchConfig(4)), "chunk_size": 2},
            "chunk_size=2, but dist_attn_config says 4",
        ),
        (
            {"dist_attn_config": magi.DistAttnConfig(magi.DispatchConfig(alg=magi.DispatchAlg()))},
            "alg must be MinHeapDispatchAlg",
        ),
    ],
)
def test_keys_that_are_refused(changes: dict[str, object], said: str) -> None:
    assert said in refused(**changes)


# What plans choose instead.
OVERLAP = {
    "mode": magi.AttnOverlapMode.DYNAMIC,
    "dynamic_max_degree": None,
    "min_chunk_size": 256,
    "max_num_chunks": 32,
    "alg": magi.GreedyOverlapAlg(),
    "calc_cost_factor": 2.0,
    "comm_cost_factor": 2.0,
}


def test_the_defaults_of_magi_attention_are_taken() -> None:
    spelt = magi.OverlapConfig(magi.AttnOverlapMode.STATIC, 1, 8, 512, 64, magi.UniformOverlapAlg())
    assert spelt == magi.OverlapConfig()
    assert magi.OverlapConfig(degree=None).degree is None
    assert magi.DistAttnConfig(overlap_config=spelt) == magi.DistAttnConfig()


def test_calls_that_are_refused() -> None:
    key = CASES["causal"].key(None)
    q, k, v = (t for t in CASES["causal"].tensors()[:3])
    with pytest.raises(ArgumentError, match=r"q must be \[tokens, 4, 8\], as the key says"):
        magi.calc_attn(k, k, v, key)
    with pytest.raises(ArgumentError, match="x must be 40 tokens along dim 0, got"):
        magi.dispatch(q[1:], key)
    with pytest.raises(NotImplementedError, match="return_max_logits=True: no kernel"):
        magi.calc_attn(q, k, v, key, return_max_logits=True)
    with pytest.raises(NotImplementedError, match="degree=2 is not taken: a plan's costs"):
        magi.OverlapConfig(degree=2)
    assert magi.OverlapConfig() == magi.OverlapConfig(degree=1)
    for name, value in OVERLAP.items():
        with pytest.raises(NotImplementedError, match=f"{name}=.* is not taken: a plan's costs"):
            magi.OverlapConfig(**{name: value})
    with pytest.raises(NotImplementedError, match="grpcoll_config=24 tunes the messages"):
        magi.DistAttnConfig(grpcoll_config=24)
    ranges = torch.tensor([[0, 40]])
    for name, value in (("sparse_load", True), ("sm_margin", 8), ("index_attn_indices", ranges)):
        with pytest.raises(NotImplementedError, match=f"{name} is for MagiAttention's own kernel"):
            magi.flex_flash_attn_func(q, k, v, ranges, ranges, **{name: value})
    with pytest.raises(TypeError, match="no argument 'sparse_lode'"):
        magi.flex_flash_attn_func(q, k, v, ranges, ranges, sparse_lode=True)
    with pytest.raises(ArgumentError, match="max_seqlen_q=39, a range has 40 tokens"):
        magi.flex_flash_attn_func(q, k, v, ranges, ranges, max_seqlen_q=39)
    for types in ([0], torch.zeros(1)):
        with pytest.raises(ValueError, match="attn_type_map must be a tensor of integers"):
            magi.flex_flash_attn_func(q, k, v, ranges, ranges, types)
    with pytest.raises(MaskError, match="flex_flash_attn_func: types"):
        magi.flex_flash_attn_func(q, k, v, ranges, ranges, torch.tensor([4]))
    with pytest.raises(ArgumentError, match="causal=True with window_size="):
        magi.magi_attn_varlen_key([0, 8], [0, 8], 2, 2, 4, causal=True, window_size=(2, 0))
    with pytest.raises(ArgumentError, match="deals tokens by"):
        config = magi.DistAttnConfig(magi.DispatchConfig(chunk_size=2))
        magi.make_varlen_key_for_new_mask_after_dispatch(
            [0, 40], [0, 40], key, dist_attn_config=config
        )
    with pytest.raises(ArgumentError, match="39 x 39 tokens, but 40 were dispatched"):
        magi.make_varlen_key_for_new_mask_after_dispatch([0, 39], [0, 39], key)


def test_no_key_yet() -> None:
    magi.clear_cache()
    with pytest.raises(ArgumentError, match="no key was made"):
        magi.get_most_recent_key(None)
    key = Magi(4, ((0, 4),), ((0, 4),)).key(None)
    assert magi.get_most_recent_key(None) is key
