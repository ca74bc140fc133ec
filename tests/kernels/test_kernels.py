"""Every kernel of the registry that runs on CPU, against the dense specification."""

import numpy as np
import pytest
import torch
from dense import assert_same, dense_attention, dense_gradients, worst

from customized_ops.ring_attention import wrap_ring_attn_func
from customized_ops.ring_attention.core.kernels import BackwardOperands, ForwardOperands
from customized_ops.ring_attention.core.mask import AttnMask

from .small_cases import (
    ABLE,
    HEADS,
    KINDS,
    PLAIN,
    SCALE,
    WIDE,
    draw,
    for_dense,
    over_able,
    over_dtypes,
    over_kernels,
    over_kinds,
    pairs_of,
    skip_if_refused,
    tokens_of,
)

WIDTHS = [(8, 8), (8, 5), (6, 16)]
# Every shape with plain scores, one shape with each other way to score.
over_shapes = pytest.mark.parametrize(
    ("kernel", "scoring", "kv_heads", "widths"),
    [
        pytest.param(kernel, scoring, kv_heads, widths, id=f"{name}-{kv_heads}-{widths}")
        for name, (kernel, scoring) in ABLE.items()
        for kv_heads in (4, 2, 1)
        for widths in WIDTHS
        if scoring is PLAIN or (kv_heads, widths) == (2, (8, 5))
    ],
)


def assert_close(name, got, want, plain, dtype):
    """1e-10 in fp64; else no worse than twice plain torch in ``dtype``, plus rounding: the result
    once to ``dtype``, and on the way out, lse and two sums to fp32."""
    if dtype == torch.float64:
        return assert_same(name, got, want)
    finite = want[want.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    rounding = (torch.finfo(dtype).eps + 4 * torch.finfo(torch.float32).eps) * largest
    error = worst(plain[want.isfinite()], finite)
    assert_same(name, got, want, 2 * error + rounding)


@pytest.mark.covering(2)
@over_kinds
@over_shapes
@over_dtypes
def test_forward(kernel, kind, scoring, kv_heads, widths, dtype):
    rows, keys, slices = KINDS[kind]
    mask = AttnMask.from_slices(slices, rows, keys)
    exact = draw(dtype, rows, keys, kv_heads, *widths)[:3]
    low = [t.to(dtype) for t in exact]
    skip_if_refused(kernel, low[0], scoring)
    tokens = tokens_of(rows, keys)
    want = dense_attention(*exact, mask, SCALE, **for_dense(scoring, tokens))
    plain = dense_attention(*low, mask, SCALE, **for_dense(scoring, tokens))
    got = kernel.forward(
        ForwardOperands(*low), pairs_of(mask), scoring, tokens if scoring.needs_tokens else None
    )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert got[1].dtype == wide and got[0].dtype in (dtype, wide)
    for name, *values in zip(("out", "lse"), got, want, plain, strict=True):
        assert_close(name, *values, dtype)


@pytest.mark.covering(2)
@over_kinds
@over_shapes
@over_dtypes
def test_backward_of_a_part_of_the_keys(kernel, kind, scoring, kv_heads, widths, dtype):
    check_backward(kernel, kind, scoring, kv_heads, widths, dtype)


@pytest.mark.covering(1)
@over_kinds
@over_able
@over_dtypes
@pytest.mark.parametrize("widths", [(8, 8), (8, 5)])
def test_backward_with_a_gradient_of_lse(kernel, kind, scoring, widths, dtype):
    check_backward(kernel, kind, scoring, 2, widths, dtype, lse_gradient=True)


def check_backward(kernel, kind, scoring, kv_heads, widths, dtype, lse_gradient=False):
    """The rows also attend ``more`` keys elsewhere: out and lse are those of all their keys."""
    rows, keys, slices = KINDS[kind]
    more = 5
    here = AttnMask.from_slices(slices, rows, keys)
    there = AttnMask.from_slices([(0, rows - 1, 0, more, -WIDE, WIDE)], rows, more)
    mask = torch.from_numpy(np.hstack([here.to_dense(), there.to_dense()]))
    q, k, v, dout = draw(dtype, rows, keys + more, kv_heads, *widths)
    low_q, low_k, low_v, low_dout = (t.to(dtype) for t in (q, k, v, dout))
    skip_if_refused(kernel, low_q, scoring, ("lse gradient",) if lse_gradient else ())
    dlse = 3 * dout[..., 0].transpose(1, 2) if lse_gradient else None
    tokens = tokens_of(rows, keys + more)
    same = for_dense(scoring, tokens)
    out, lse, *want = dense_gradients(q, k, v, mask, SCALE, dout, dlse, **same)
    low = low_q, low_k, low_v, mask, SCALE, low_dout, dlse
    _, _, *plain = dense_gradients(*low, **same)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    final = out.to(dtype), lse.to(wide)

    def part(where, part_mask):
        block = low_k[:, where], low_v[:, where]
        here = tokens.part(slice(None), where) if scoring.needs_tokens else None
        low_dlse = None if dlse is None else dlse.to(wide)
        return kernel.backward(
            BackwardOperands(low_dout, low_q, *block, *final, low_dlse),
            pairs_of(part_mask),
            scoring,
            here,
        )

    dq, dk, dv = part(slice(0, keys), here)
    other_dq, other_dk, other_dv = part(slice(keys, None), there)
    got = dq + other_dq, torch.cat([dk, other_dk], 1), torch.cat([dv, other_dv], 1)
    for name, *values in zip(("dq", "dk", "dv"), got, want, plain, strict=True):
        assert_close(name, *values, dtype)


@over_kernels
def test_rows_without_keys_are_exactly_zero(kernel):
    q, k, v, dout = draw(torch.float32, 9, 12, 2, 8, 8)
    mask = AttnMask.from_slices([(2, 5, 3, 7, -WIDE, WIDE)], 9, 12)
    skip_if_refused(kernel, q)
    out, lse = kernel.forward(ForwardOperands(q, k, v), pairs_of(mask), PLAIN, None)
    dq, dk, dv = kernel.backward(
        BackwardOperands(dout, q, k, v, out, lse), pairs_of(mask), PLAIN, None
    )
    for rows in (slice(0, 2), slice(5, 9)):
        assert (out[:, rows] == 0).all() and (dq[:, rows] == 0).all()
        assert (lse[..., rows] == -torch.inf).all()
    for unread in (slice(0, 3), slice(7, 12)):
        assert (dk[:, unread] == 0).all() and (dv[:, unread] == 0).all()
    assert all(t.isfinite().all() for t in (out, dq, dk, dv))


def strided(t):
    """Views of the same values that are not contiguous: heads outside tokens, part of a wider
    tensor, every other token."""
    yield t.transpose(1, 2).contiguous().transpose(1, 2)
    yield torch.cat([t, t], dim=-1)[..., t.shape[-1] :]
    yield t.repeat_interleave(2, dim=1)[:, ::2]


@pytest.mark.covering(1)
@over_able
@pytest.mark.parametrize("kind", ["causal, more keys", "window", "several slices share rows"])
@pytest.mark.parametrize("way", range(3))
def test_strides_are_free(kernel, kind, way, scoring):
    rows, keys, slices = KINDS[kind]
    mask = AttnMask.from_slices(slices, rows, keys)
    q, k, v, dout = draw(torch.float64, rows, keys, 2, 8, 6)
    skip_if_refused(kernel, q, scoring)
    tokens = tokens_of(rows, keys)
    same = for_dense(scoring, tokens)
    want_out, want_lse, *want = dense_gradients(q, k, v, mask, SCALE, dout, **same)
    q_, k_, v_, dout_, out_ = (list(strided(t))[way] for t in (q, k, v, dout, want_out))
    assert not any(t.is_contiguous() for t in (q_, k_, v_, dout_, out_))
    out, lse = kernel.forward(ForwardOperands(q_, k_, v_), pairs_of(mask), scoring, tokens)
    assert_same("out", out, want_out)
    assert_same("lse", lse, want_lse)
    lse_ = want_lse.transpose(1, 2).contiguous().transpose(1, 2)
    got = kernel.backward(
        BackwardOperands(dout_, q_, k_, v_, out_, lse_), pairs_of(mask), scoring, tokens
    )
    for name, *values in zip(("dq", "dk", "dv"), got, want, strict=True):
        assert_same(name, *values)


@over_kernels
def test_keys_expanded_over_heads(kernel):
    q, k, v, _ = draw(torch.float64, 9, 12, 1, 8, 8)
    skip_if_refused(kernel, q)
    mask = AttnMask.dense(9, 12, causal=True)
    want, _ = dense_attention(q, k, v, mask, SCALE)
    out, _ = kernel.forward(
        ForwardOperands(q, *(t.expand(-1, -1, HEADS, -1) for t in (k, v))),
        pairs_of(mask),
        PLAIN,
        None,
    )
    assert_same("out", out, want)


@pytest.mark.parametrize("shape", [(2, 9, 1, 1), (1, 9, 1, 1), (2, 9, 3, 1)])
def test_columns_of_any_strides_are_widened(shape: tuple[int, ...]) -> None:
    """A single column counts as dense whatever its stride is."""
    q, k, v = (torch.randn(*shape[:3], n).double() for n in (1, 1, 3))
    odd = (*q.stride()[:3], shape[1] * shape[2])
    if shape[2] == 1:
        odd = (odd[0], odd[1], odd[3], odd[3])
    strange = [t.as_strided(shape, odd) for t in (q, k)]
    assert all(t.is_contiguous() for t in strange)
    found = wrap_ring_attn_func(*strange, v, causal=True, kernel="torch")
    assert_same("out", found, wrap_ring_attn_func(q, k, v, causal=True, kernel="reference"))
