"""Kernels on many rows, on tokens in any order and on some heads of a batch."""

from dataclasses import replace

import pytest
import torch
from dense import assert_same, dense_gradients

from customized_ops.ring_attention.core.kernels import BackwardOperands, ForwardOperands, Tokens
from customized_ops.ring_attention.core.kernels.adapters.torch_sdpa import BAND_ROWS
from customized_ops.ring_attention.core.mask import AttnMask

from .small_cases import (
    LONG,
    SCALE,
    SCORINGS,
    SLOPES,
    draw,
    for_dense,
    over_able,
    over_dtypes,
    over_kernels,
    pairs_of,
    skip_if_refused,
    tokens_of,
)


@pytest.mark.covering(1)
@over_able
@pytest.mark.parametrize("mask", LONG.values(), ids=LONG)
def test_more_rows_than_a_tile(kernel, mask, scoring):
    assert mask.q_len > 2 * BAND_ROWS
    q, k, v, dout = (t[:1] for t in draw(torch.float64, mask.q_len, mask.k_len, 2, 4, 4))
    skip_if_refused(kernel, q, scoring)
    if scoring.alibi_slopes is not None:
        scoring = replace(scoring, alibi_slopes=SLOPES[:1])
    tokens = tokens_of(mask.q_len, mask.k_len)
    want = dense_gradients(q, k, v, mask, SCALE, dout, **for_dense(scoring, tokens, batch=1))
    out, lse = kernel.forward(ForwardOperands(q, k, v), pairs_of(mask), scoring, tokens)
    got = (
        out,
        lse,
        *kernel.backward(
            BackwardOperands(dout, q, k, v, out, lse), pairs_of(mask), scoring, tokens
        ),
    )
    for name, *values in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert_same(name, *values)


@over_kernels
@over_dtypes
def test_alibi_is_not_rounded_to_the_inputs_dtype(kernel, dtype):
    """A thousand tokens away, bf16 would be four tokens off."""
    q, k, v, _ = (t.to(dtype) for t in draw(dtype, 3, 5, 2, 8, 8))
    scoring = SCORINGS["alibi"]
    skip_if_refused(kernel, q, scoring)
    tokens = Tokens(torch.arange(3), torch.arange(5), 1001 + torch.arange(5), first_head=0)
    _, lse = kernel.forward(
        ForwardOperands(q * 0, k, v), pairs_of(AttnMask.dense(3, 5)), scoring, tokens
    )
    want = torch.logsumexp(-SLOPES[0, :, None, None].double() * tokens.distances(), dim=-1)
    assert_same("lse", lse, want.expand(2, -1, -1), tolerance=1e-3)


@over_able
def test_tokens_in_any_order(kernel, scoring):
    """As a rank holds them under a layout that is not contiguous."""
    q, k, v, _ = draw(torch.float64, 12, 15, 2, 8, 8)
    skip_if_refused(kernel, q, scoring)
    mask, tokens = AttnMask.dense(12, 15), tokens_of(12, 15)
    out, lse = kernel.forward(ForwardOperands(q, k, v), pairs_of(mask), scoring, tokens)
    rows, keys = torch.arange(12).roll(5), torch.arange(15).flip(0)
    mixed = replace(tokens.part(rows, slice(None)), keys=tokens.keys[keys])
    mixed = replace(mixed, key_positions=tokens.key_positions[keys])
    got = kernel.forward(
        ForwardOperands(q[:, rows], k[:, keys], v[:, keys]), pairs_of(mask), scoring, mixed
    )
    assert_same("out", got[0], out[:, rows])
    assert_same("lse", got[1], lse[..., rows])


@over_able
def test_some_heads_of_one_batch_entry(kernel, scoring):
    """The last two heads, which read the last kv head, of the last entry."""
    q, k, v, dout = draw(torch.float64, 12, 15, 2, 8, 8)
    skip_if_refused(kernel, q, scoring)
    pairs, tokens = pairs_of(AttnMask.dense(12, 15, causal=True)), tokens_of(12, 15)
    out, lse = kernel.forward(ForwardOperands(q, k, v), pairs, scoring, tokens)
    gradients = kernel.backward(BackwardOperands(dout, q, k, v, out, lse), pairs, scoring, tokens)
    q, k, v, dout = q[1:, :, 2:], k[1:, :, 1:], v[1:, :, 1:], dout[1:, :, 2:]
    tokens = replace(tokens, first_head=tokens.first_head + 2, first_batch=tokens.first_batch + 1)
    if scoring.alibi_slopes is not None:
        scoring = replace(scoring, alibi_slopes=scoring.alibi_slopes[-1:, 2:])
    part, part_lse = kernel.forward(ForwardOperands(q, k, v), pairs, scoring, tokens)
    got = kernel.backward(BackwardOperands(dout, q, k, v, part, part_lse), pairs, scoring, tokens)
    assert_same("out", part, out[1:, :, 2:])
    assert_same("lse", part_lse, lse[1:, 2:])
    for name, mine, all_heads in zip(("dq", "dk", "dv"), got, gradients, strict=True):
        assert_same(name, mine, all_heads[1:, :, all_heads.shape[2] // 2 :])
