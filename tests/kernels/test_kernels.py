"""Every kernel of the registry that runs on CPU, against the dense specification."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from dense import assert_same, dense_attention, dense_gradients, worst

from customized_ops.ring_attention.core.kernels import (
    KERNELS,
    BackwardOperands,
    ForwardOperands,
    Pairs,
    Request,
    Scoring,
    Tokens,
)
from customized_ops.ring_attention.core.kernels.adapters import reference, torch_sdpa
from customized_ops.ring_attention.core.kernels.adapters.torch_sdpa import (
    BAND_ROWS,
    BIAS_KEYS,
    bias_tiles,
    tiles,
)
from customized_ops.ring_attention.core.kernels.protocol.scoring import keep
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.mask.slices import as_slices, to_dense

WIDE = 999  # wider than any sequence here: no bound
SCALE = 0.35

SLOPES = torch.tensor([[0.5, 0.25, 0.1, 0.03], [0.4, 0.0, 0.2, 0.05]])
SEED = torch.tensor([0x123456789ABCDEF])
SCORINGS = {
    "plain": Scoring(SCALE),
    "softcap": Scoring(SCALE, softcap=1.5),
    "alibi": Scoring(SCALE, alibi_slopes=SLOPES[:1]),
    "dropout": Scoring(SCALE, dropout_p=0.3, dropout_seed=SEED),
    "all": Scoring(SCALE, 1.5, SLOPES, 0.3, SEED),
}
PLAIN = SCORINGS["plain"]

# rows, keys, slices
KINDS = {
    "full": (13, 17, [(0, 13, 0, 17, -WIDE, WIDE)]),
    "causal square": (16, 16, [(0, 16, 0, 16, -WIDE, 0)]),
    "causal, more keys": (9, 17, [(0, 9, 0, 17, -WIDE, 8)]),
    "causal, more rows": (17, 9, [(0, 17, 0, 9, -WIDE, -8)]),
    "diagonal not in a corner": (13, 17, [(0, 13, 0, 17, -WIDE, 2)]),
    "window": (16, 16, [(0, 16, 0, 16, -3, 2)]),
    "inverse causal": (12, 15, [(0, 12, 0, 15, 1, WIDE)]),
    "several slices share rows": (
        12,
        16,
        [(0, 12, 0, 3, -WIDE, WIDE), (2, 12, 3, 9, -WIDE, 1), (4, 8, 10, 16, 4, 6)],
    ),
    "rows out of order": (12, 12, [(6, 12, 0, 9, -WIDE, 0), (0, 6, 3, 9, -WIDE, WIDE)]),
    "one shared row": (6, 9, [(0, 4, 0, 5, -WIDE, WIDE), (3, 6, 5, 9, -WIDE, WIDE)]),
    "one key": (11, 14, [(2, 11, 5, 6, -WIDE, WIDE)]),
    "one row": (11, 14, [(4, 5, 2, 13, -WIDE, WIDE)]),
    "one diagonal": (11, 14, [(0, 11, 0, 14, 2, 2)]),
    "uncovered rows": (14, 14, [(3, 7, 0, 6, -WIDE, 0), (10, 12, 8, 14, -WIDE, WIDE)]),
    "no slices": (7, 9, []),
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
HEADS = 4

# By name: the kernel, and what it says that it can do on CPU.
ON_CPU = {
    name: (kernel, able)
    for name, kernel in KERNELS.items()
    for able in kernel.CAPABILITIES
    if able.device == "cpu"
}
over_kernels = pytest.mark.parametrize(
    "kernel", [kernel for kernel, _ in ON_CPU.values()], ids=ON_CPU
)
over_kinds = pytest.mark.parametrize("kind", KINDS)
over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
over_scorings = pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
# What each kernel declares that it can do; that it refuses the rest is a test of its own.
ABLE = {
    f"{kernel_name}-{name}": (kernel, scoring)
    for kernel_name, (kernel, able) in ON_CPU.items()
    for name, scoring in SCORINGS.items()
    if set(scoring.features) <= set(able.features)
}
over_able = pytest.mark.parametrize(("kernel", "scoring"), ABLE.values(), ids=ABLE)
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


def draw(dtype, rows, keys, kv_heads, d, e):
    """q, k, v, dout in fp64, holding values of ``dtype``."""
    source = torch.Generator().manual_seed(rows * 100 + keys)
    shapes = [(2, rows, HEADS, d), (2, keys, kv_heads, d), (2, keys, kv_heads, e)]
    shapes.append((2, rows, HEADS, e))
    exact = [torch.randn(shape, dtype=torch.float64, generator=source) for shape in shapes]
    return [t.to(dtype).double() for t in exact]


def tokens_of(rows, keys):
    """Rows and keys in the middle of longer sequences, the two counted from different starts."""
    keys = 500 + torch.arange(keys)
    return Tokens(1000 + torch.arange(rows), keys, keys + 498, first_head=3, first_batch=7)


def for_dense(scoring, tokens, batch=2):
    """The keywords of the dense specification that say the same."""
    kept = None
    if scoring.dropout_p:
        counts = tokens.first_head, HEADS, tokens.first_batch, batch
        kept = keep(SEED, scoring.dropout_p, tokens.rows, tokens.keys, *counts)
    slopes = scoring.alibi_slopes
    return {
        "softcap": scoring.softcap,
        "alibi_slopes": None if slopes is None else slopes[:batch],
        "keep": kept,
        "dropout_p": scoring.dropout_p,
        "key_positions": tokens.key_positions - tokens.rows[0],
    }


def pairs_of(mask):
    return Pairs(mask.slices, mask.q_len, mask.k_len)


def skip_if_refused(kernel, q, scoring=PLAIN, features=()):
    _, able = ON_CPU[kernel.NAME]
    heads = q.shape[2], q.shape[2]
    asked = (*scoring.features, *features)
    request = Request(q.device, q.dtype, q.shape[-1], q.shape[-1], *heads, asked)
    reason = able.refuses(request)
    if reason is not None:
        pytest.skip(reason)


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
    out, lse, *want = gradients(q, k, v, mask, dout, dlse, same)
    _, _, *plain = gradients(low_q, low_k, low_v, mask, low_dout, dlse, same)
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


def gradients(q, k, v, mask, dout, dlse, scoring):
    """(out, lse, dq, dk, dv) of dense attention, with a gradient of lse where one is given."""
    if dlse is None:
        return dense_gradients(q, k, v, mask, SCALE, dout, **scoring)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = dense_attention(*leaves, mask, SCALE, **scoring)
    found = torch.autograd.grad((out, lse), leaves, (dout, dlse.to(lse.dtype)))
    return out.detach(), lse.detach(), *found


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


LONG = {
    "window": AttnMask.dense(600, window=(40, 3)),
    "inverse causal": AttnMask.dense(600, 500, window=(0, -1)),
    "packed windows": AttnMask.varlen([0, 280, 281, 600], causal=True, window=(300, 0)),
}


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


@pytest.mark.covering(1)
@over_kinds
@over_scorings
@pytest.mark.parametrize("height", [1, 5])
def test_blocks_of_the_reference_change_nothing(kind, scoring, height, monkeypatch):
    rows, keys, slices = KINDS[kind]
    pairs = pairs_of(AttnMask.from_slices(slices, rows, keys))
    q, k, v, dout = draw(torch.float64, rows, keys, 2, 8, 5)
    tokens = tokens_of(rows, keys)

    def results():
        out, lse = reference.forward(ForwardOperands(q, k, v), pairs, scoring, tokens)
        return (
            out,
            lse,
            *reference.backward(BackwardOperands(dout, q, k, v, out, lse), pairs, scoring, tokens),
        )

    want = results()
    limit = height * 2 * HEADS * keys
    monkeypatch.setattr(reference, "BLOCK_SCORES", limit)
    blocks = list(reference._blocks(q, k, pairs.slices))
    assert len(slices) == 0 or len(blocks) > 1 or kind == "one row"
    assert all(2 * HEADS * block.mask.numel() <= limit for block in blocks)
    for name, *values in zip(("out", "lse", "dq", "dk", "dv"), results(), want, strict=True):
        assert_same(name, *values, tolerance=1e-12)


@over_kinds
def test_blocks_of_the_reference_cover_the_mask(kind, monkeypatch):
    rows, keys, slices = KINDS[kind]
    mask = AttnMask.from_slices(slices, rows, keys)
    monkeypatch.setattr(reference, "BLOCK_SCORES", 3 * keys)
    found = np.zeros((rows, keys), dtype=bool)
    for block in reference._blocks(torch.zeros(1, rows, 1, 1), torch.zeros(1, keys), mask.slices):
        found[block.rows, block.keys] = block.mask.numpy()
    assert (found == mask.to_dense()).all()


def covered_by(cut, rows, keys):
    """How often torch's tiles attend each pair."""
    count = np.zeros((rows, keys), dtype=int)
    for tile in cut:
        block = np.ones((tile.q1 - tile.q0, tile.k1 - tile.k0), dtype=bool)
        if tile.causal:
            assert block.shape[0] == block.shape[1], "a causal tile is square"
            block = np.tril(block)
        additive = tile.mask(torch.zeros(()))
        if additive is not None:
            block = (additive == 0).numpy()
            assert ((additive == 0) | (additive == -torch.inf)).all()
        assert block.any(axis=1).all(), "each row of a tile has a key"
        count[tile.q0 : tile.q1, tile.k0 : tile.k1] += block
    return count


over_cuts = pytest.mark.parametrize("cut", [tiles, bias_tiles])


@over_kinds
@over_cuts
def test_tiles_cover_a_slice_once(kind, cut, monkeypatch):
    monkeypatch.setattr(torch_sdpa, "BAND_ROWS", 4)
    monkeypatch.setattr(torch_sdpa, "BIAS_KEYS", 5)
    rows, keys, slices = KINDS[kind]
    mask = AttnMask.from_slices(slices, rows, keys)
    assert (covered_by(cut(mask.slices), rows, keys) == mask.to_dense()).all()


@pytest.mark.parametrize("mask", LONG.values(), ids=LONG)
@over_cuts
def test_tiles_cover_a_long_slice_once(mask, cut):
    found = covered_by(cut(mask.slices), mask.q_len, mask.k_len)
    assert (found == mask.to_dense()).all()


def test_tiles_under_alibi_are_small():
    slices = AttnMask.dense(3 * BAND_ROWS, 3 * BIAS_KEYS, causal=True).slices
    sizes = {(tile.q1 - tile.q0, tile.k1 - tile.k0) for tile in bias_tiles(slices)}
    assert max(sizes) == (BAND_ROWS, BIAS_KEYS)
    assert all(rows <= BAND_ROWS and keys <= BIAS_KEYS for rows, keys in sizes)


def test_tiles_of_common_masks_need_no_additive_mask():
    slices = as_slices([(0, 8, 0, 8, -7, 7), (8, 16, 0, 16, -15, 0)])
    assert (covered_by(tiles(slices), 16, 16) == to_dense(slices, 16, 16)).all()
    assert [(tile.causal, tile.band) for tile in tiles(slices)] == [
        (False, None),
        (False, None),
        (True, None),
    ]
