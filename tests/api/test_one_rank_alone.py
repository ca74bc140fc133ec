"""What one rank alone asks of a face and cannot have: its peers hear of it, and none waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from customized_ops.ring_attention import DisagreementError, Layout, run_ranks
from customized_ops.ring_attention.api import (
    magi_attention,
    ring_flash_attn,
    torch_context_parallel,
    transformers,
    yunchang,
)
from customized_ops.ring_attention.api.torch_context_parallel.sdpa import SequenceSharding, flex
from customized_ops.ring_attention.api.transformers.mask import Mask
from customized_ops.ring_attention.api.transformers.mask_function import MaskDescription
from customized_ops.ring_attention.api.yunchang.degrees import SequenceParallel
from customized_ops.ring_attention.core.comm import Comm

Call = Callable[[Comm, bool], object]  # whether it is the rank whose call cannot be


def yunchang_packed(comm: Comm, bad: bool) -> object:
    attend = yunchang.LongContextAttentionQKVPacked(parallel=SequenceParallel(1, 2, comm))
    return attend(torch.zeros(1, 4, 2 if bad else 3, 2, 8))


def yunchang_grouped(comm: Comm, bad: bool) -> object:
    parallel = SequenceParallel(1, 2, comm)
    attend = yunchang.LongContextAttentionQKVPacked(parallel=parallel, kv_heads=1)
    return attend(torch.zeros(1, 4, 2 if bad else 4, 8))


def ring_packed(comm: Comm, bad: bool) -> object:
    qkv = torch.zeros(1, 4, 2 if bad else 3, 2, 8)
    return ring_flash_attn.ring_flash_attn_qkvpacked_func(qkv, group=comm)


def ring_packed_documents(comm: Comm, bad: bool) -> object:
    q, kv = torch.zeros(4, 2, 8), torch.zeros(4, 3 if bad else 2, 2, 8)
    function = ring_flash_attn.zigzag_ring_flash_attn_varlen_kvpacked_func
    return function(q, kv, torch.tensor([0, 4]), 4, group=comm)


def flex_scores(comm: Comm, bad: bool) -> object:
    q = torch.zeros(1, 2, 4, 8)
    return flex(
        SequenceSharding(comm), q, q, q, score_mod=(lambda score, *_: score) if bad else None
    )


def flex_of_the_program(comm: Comm, bad: bool) -> object:
    q = torch.zeros(1, 2, 4, 8)
    options = {"BLOCK_M": 64} if bad else None
    layout = Layout.contiguous(8, 2)
    with torch_context_parallel.context_parallel(comm, layout=layout):
        return torch_context_parallel.flex_attention(q, q, q, kernel_options=options)


def weights_of_multi_head_attention(comm: Comm, bad: bool) -> object:
    attend, x = torch.nn.MultiheadAttention(16, 2, batch_first=True), torch.zeros(1, 4, 16)
    with torch_context_parallel.context_parallel(comm, layout=Layout.contiguous(8, 2)):
        return attend(x, x, x, need_weights=bad)


def unsharded(comm: Comm, bad: bool) -> object:
    dims = [3 if bad else 1]
    unshard = torch_context_parallel.context_parallel_unshard
    return unshard(comm, [torch.zeros(1, 4, 2)], dims, layout="contiguous")


def transformers_layer(comm: Comm, keys: int = 4, padding: torch.Tensor | None = None, **asked):
    q, k = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, keys, 8)
    with transformers.sequence_parallel(comm, Layout.contiguous(8, 2)):
        mask = Mask(MaskDescription(right=0), 1, 4, keys, padding=padding)
        return transformers.attention(torch.nn.Module(), q, k, k, mask, **asked)


def weights_of_transformers(comm: Comm, bad: bool) -> object:
    return transformers_layer(comm, output_attentions=bad)


def padding_of_a_part(comm: Comm, bad: bool) -> object:
    return transformers_layer(comm, padding=torch.ones(1, 4) if bad else None)


def cache_of_a_part(comm: Comm, bad: bool) -> object:
    return transformers_layer(comm, keys=5 if bad else 4)


def tokens_of_another_part(comm: Comm, bad: bool) -> object:
    first = 4 * (comm.rank != bad)
    return transformers_layer(comm, position_ids=torch.arange(first, first + 4)[None])


def magi_logits(comm: Comm, bad: bool) -> object:
    key = magi_attention.magi_attn_varlen_key([0, 8], [0, 8], 2, 2, 8, cp_group_or_mesh=comm)
    q = torch.zeros(4, 2, 8)
    return magi_attention.calc_attn(q, q, q, key, return_max_logits=bad)


CALLS: dict[Call, str] = {
    yunchang_packed: "qkv must be [b, l, 3, h, d]",
    yunchang_grouped: "must have the heads of q and 2 x kv_heads=1",
    ring_packed: "dim -3 of qkv must hold q, k, v",
    ring_packed_documents: "dim -3 of kv must hold k, v",
    flex_scores: "score_mod is not taken",
    flex_of_the_program: "kernel_options are for torch's own kernel",
    weights_of_multi_head_attention: "need_weights=True makes the weights of this rank's tokens",
    unsharded: "dim 3 of buffers[0], which has 3",
    weights_of_transformers: "output_attentions: the weights are never made",
    padding_of_a_part: "attention_mask does not go with a rank's part",
    cache_of_a_part: "4 queries with 5 keys",
    tokens_of_another_part: "position_ids begin with [0, 1, 2, 3]",
    magi_logits: "no kernel here tells the largest score",
}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_the_peers_hear_of_it(call: Call) -> None:
    def rank(comm: Comm) -> Exception | None:
        try:
            call(comm, comm.rank == 1)
        except (ValueError, NotImplementedError) as error:
            return error
        return None

    peer, own = run_ranks(2, rank)
    assert CALLS[call] in str(own) and not isinstance(own, DisagreementError)
    assert isinstance(peer, DisagreementError), peer
    assert f"rank 1: {own}" in str(peer)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_without_it_the_call_is_made(call: Call) -> None:
    run_ranks(2, lambda comm: call(comm, False))
