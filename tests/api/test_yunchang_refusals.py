"""What yunchang's modules over this package's attention refuse."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from refusals import refusals

from customized_ops.ring_attention import AttnMask
from customized_ops.ring_attention.api.yunchang import (
    EXTRACT_FUNC_DICT,
    AttnType,
    LongContextAttention,
    LongContextAttentionQKVPacked,
    UlyssesAttention,
    set_seq_parallel_pg,
)
from customized_ops.ring_attention.api.yunchang import degrees as sequence_parallel
from customized_ops.ring_attention.api.yunchang.degrees import SequenceParallel

ALONE = SequenceParallel(1, 1)
X = torch.zeros(1, 4, 2, 8)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: LongContextAttention(1, 2, parallel=ALONE), ValueError, "must be 2 and 1, the"),
        (
            lambda: LongContextAttentionQKVPacked(2, 1, parallel=ALONE),
            ValueError,
            "must be 3 and 1, the dims of heads and of tokens, got 2 and 1",
        ),
        (
            lambda: LongContextAttention(ring_impl_type="zag", parallel=ALONE),
            ValueError,
            "ring_impl_type must be one of basic, zigzag, strip, basic_pytorch, basic_flashinfer, "
            "basic_npu, got 'zag'",
        ),
        (
            lambda: LongContextAttention(ring_impl_type="basic_npu", parallel=ALONE),
            NotImplementedError,
            "ask for a kernel that is not here",
        ),
        (
            lambda: UlyssesAttention(attn_type=AttnType.SAGE_FP8),
            NotImplementedError,
            "attn_type=AttnType.SAGE_FP8 ask for a kernel that is not here",
        ),
        (
            lambda: LongContextAttention(attn_type="fa", parallel=ALONE),
            ValueError,
            "attn_type must be an AttnType, got 'fa'",
        ),
        (lambda: UlyssesAttention(use_sync=True), NotImplementedError, "use_sync=True is not"),
        (
            lambda: LongContextAttention(use_pack_qkv=True, parallel=ALONE),
            NotImplementedError,
            "(the executor decides what travels in one message); leave it at its default",
        ),
        (
            lambda: LongContextAttention(attn_processor=X, parallel=ALONE),
            NotImplementedError,
            "it is for SPARSE_SAGE, which skips pairs",
        ),
        (
            lambda: SequenceParallel(2, 1),
            ValueError,
            "ulysses_degree=2 times ring_degree=1 is 2 ranks, but the group has 1",
        ),
        (lambda: SequenceParallel(0, 1), ValueError, "ulysses_degree must be a number of ranks"),
        (
            lambda: set_seq_parallel_pg(1, 1, 0, 2),
            ValueError,
            "rank=0 of world_size=2, but torch.distributed has rank 0 of 1 (not initialised)",
        ),
        (
            lambda: set_seq_parallel_pg(1, 2, 0, 1),
            ValueError,
            "sp_ulysses_degree=1 times sp_ring_degree=2 must divide the 1 ranks",
        ),
        (
            lambda: EXTRACT_FUNC_DICT["strip"](X, 0, 4, rd=3, ud=1),
            ValueError,
            "ring degree rd=3 times Ulysses degree ud=1 must be the 4 ranks",
        ),
        (
            lambda: EXTRACT_FUNC_DICT["zigzag"](X, 0, 4, 0, 4),
            ValueError,
            "EXTRACT_FUNC_DICT['zigzag']: rd must be a number of ranks, 1 or more, got 0",
        ),
        (
            lambda: EXTRACT_FUNC_DICT["basic"](X, 0, 4, rd=3, ud=1),
            ValueError,
            "must be the 4 ranks",
        ),
        (
            lambda: LongContextAttention(parallel=ALONE)(X, X, X, *[0.0] * 8, 1),
            ValueError,
            "takes no further arguments, got (1,)",
        ),
        (
            lambda: LongContextAttention(parallel=ALONE)(
                X, X, X, causal=True, mask=AttnMask.full(4)
            ),
            ValueError,
            "mask says which pairs attend; leave causal, window_size and cu_seqlens",
        ),
        (
            lambda: LongContextAttention(parallel=ALONE)(X[0], X[0], X[0]),
            ValueError,
            "query must be [b, l, h, d], got (4, 2, 8)",
        ),
        (
            lambda: LongContextAttentionQKVPacked(parallel=ALONE)(X),
            ValueError,
            "qkv must be [b, l, 3, h, d], got shape (1, 4, 2, 8)",
        ),
        (
            lambda: LongContextAttentionQKVPacked(parallel=ALONE, kv_heads=1)(X),
            ValueError,
            "qkv must have the heads of q and 2 x kv_heads=1 of k and v",
        ),
    ],
)
def test_what_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        make()


def test_nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_parallel, "_default", [])
    with pytest.raises(ValueError, match="by set_seq_parallel_pg or as parallel="):
        LongContextAttention()


@pytest.mark.parametrize(
    ("impl", "degrees", "tokens", "heads", "message"),
    [
        ("zigzag", (1, 2), (3, 3), 2, "3 tokens on each of 2 ranks are not laid out zigzag, which"),
        ("zigzag", (1, 2), (4, 6), 2, "the ranks of the group hold [4, 6] tokens; give total"),
        ("basic", (2, 1), (4, 4), 1, "a Ulysses degree of 2 needs as many heads, but query has 1"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_every_rank_is_told(
    impl: str,
    degrees: tuple[int, int],
    tokens: tuple[int, ...],
    heads: int,
    message: str,
) -> None:
    def call(comm: Any) -> None:
        parallel = SequenceParallel(*degrees, comm)
        x = torch.zeros(1, tokens[comm.rank], heads, 8)
        LongContextAttention(ring_impl_type=impl, parallel=parallel)(x, x, x)

    assert all(message in said for said in refusals(2, call))
