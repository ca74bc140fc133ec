"""Blocks and tiles of the kernels on CPUs cover a mask once."""

import numpy as np
import pytest
import torch
from dense import assert_same

from customized_ops.ring_attention.core.kernels import BackwardOperands, ForwardOperands
from customized_ops.ring_attention.core.kernels.adapters import reference, torch_sdpa
from customized_ops.ring_attention.core.kernels.adapters.torch_sdpa import (
    BAND_ROWS,
    BIAS_KEYS,
    bias_tiles,
    tiles,
)
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.mask.slices import as_slices, to_dense

from .small_cases import HEADS, KINDS, LONG, SCORINGS, draw, over_kinds, pairs_of, tokens_of

over_scorings = pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)


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
