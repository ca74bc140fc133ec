"""The kernel "flash4" over a dense stand-in for its library, and on GPUs over the library."""

import pickle

import numpy as np
import pytest
import torch
from dense import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from slice_strategy import UNBOUNDED, grids_of_bands

from customized_ops.ring_attention.core.kernels import (
    BackwardOperands,
    ForwardOperands,
    Pairs,
    Scoring,
)
from customized_ops.ring_attention.core.kernels.adapters import flash4, reference
from customized_ops.ring_attention.core.kernels.adapters.flash4_parts import (
    flash4_blocks,
    flash4_choice,
)
from customized_ops.ring_attention.core.kernels.window import library_calls as steps
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.mask.slices import as_slices, normalise

from .flash4_cases import HEADS, KINDS, SCORINGS, WAYS, check, draw, make_library, pairs_of


def used_blocks(library):
    return ["block_sparse_tensors" in given for _, given in library.calls]


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
def test_values(library, monkeypatch, kind, way, scoring):
    monkeypatch.setattr(flash4_choice, *WAYS[way])
    *tensors, dlse = draw(pairs_of(kind))
    check(pairs_of(kind), *tensors, dlse=dlse, scoring=scoring)
    several = kind in ("streaming", "two parts of a row", "five intervals")
    assert used_blocks(library) or not KINDS[kind][2]
    if several or way == "windows":
        assert set(used_blocks(library)) <= {way == "blocks"}


@pytest.mark.covering(1)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("batch", [1, 3])
def test_heads_and_batch(library, monkeypatch, kv_heads, batch):
    monkeypatch.setattr(flash4_choice, *WAYS["blocks"])
    pairs = pairs_of("streaming")
    check(pairs, *draw(pairs, batch, kv_heads))
    assert used_blocks(library) == [True, True]


@pytest.mark.parametrize("widths", [(128, 128), (192, 128), (256, 256)])
def test_blocks_are_as_wide_as_the_library_wants(library, monkeypatch, widths):
    monkeypatch.setattr(flash4_choice, *WAYS["blocks"])
    pairs = pairs_of("streaming")
    check(pairs, *draw(pairs, 1, HEADS, *widths))
    assert used_blocks(library) == [True, True]


@pytest.mark.covering(1)
@pytest.mark.parametrize("kv_heads", [2, HEADS])
@pytest.mark.parametrize("widths", [(24, 16), (16, 24), (192, 128)])
@pytest.mark.parametrize("way", WAYS)
def test_unequal_widths(library, monkeypatch, way, widths, kv_heads):
    monkeypatch.setattr(flash4_choice, *WAYS[way])
    pairs = pairs_of("streaming")
    check(pairs, *draw(pairs, 2, kv_heads, *widths))
    native = widths == (192, 128) and kv_heads == HEADS
    for _, passed in library.calls:
        assert (passed["q"].shape[-1] == passed["v"].shape[-1]) == (not native)


@given(grids_of_bands(300, 300), st.sampled_from(list(WAYS)))
@settings(deadline=None, derandomize=True, max_examples=30)
def test_any_slices(drawn, way):
    with pytest.MonkeyPatch.context() as patch:
        make_library(patch)
        patch.setattr(flash4_choice, *WAYS[way])
        pairs = Pairs(*drawn)
        *tensors, dlse = draw(pairs, batch=1)
        check(pairs, *tensors, dlse=dlse)


@pytest.mark.parametrize("kind", ["full", "causal", "window", "documents"])
def test_one_call_where_one_will_do(library, kind):
    pairs = pairs_of(kind)
    check(pairs, *draw(pairs))
    assert used_blocks(library) == [False, False]


# Milliseconds on an H100, 32:8 heads of 128, bf16: of window calls, and of one of blocks, forward
# and backward.
MEASURED = {
    "prefix-LM": (AttnMask.prefix_lm(32768, 8192), (13.88, 39.72), (13.93, 41.34)),
    "streaming": (AttnMask.streaming(32768, 4096, 128), (3.63, 11.16), (3.49, 11.44)),
    "block-causal": (AttnMask.block_causal(32768, 2048), (15.63, 45.96), (13.84, 40.33)),
}


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("backward", [False, True])
def test_predicted_times_are_near_measured_ones(name, backward):
    mask, windows, blocks = MEASURED[name]
    measured = windows[backward], blocks[backward]
    heads = (32, 8, 8)
    tensors = [torch.empty(1, mask.q_len, h, 128, device="meta", dtype=torch.half) for h in heads]
    pairs = Pairs(mask.slices, mask.q_len, mask.k_len)
    found = flash4_choice.seconds(ForwardOperands(*tensors), pairs, backward=backward)
    assert [1e3 * each for each in found] == pytest.approx(measured, rel=0.08)


def test_many_slices_are_one_call_of_blocks(library):
    bands = [(a, 512, a, a + 8, -UNBOUNDED, UNBOUNDED) for a in range(0, 128, 16)]
    pairs = Pairs(normalise(as_slices(bands)), 512, 512)
    check(pairs, *draw(pairs, batch=1))
    assert used_blocks(library) == [True, True]


@pytest.mark.slow
def test_many_whole_blocks_are_one_call(library):
    chosen = np.indices((5, 24)).sum(0) % 2 == 0
    pairs = Pairs(AttnMask.from_block_mask(chosen, 128).slices, 640, 24 * 128)
    check(pairs, *draw(pairs, batch=1))
    assert used_blocks(library) == [True, True]


def test_rows_of_many_intervals_take_windows(library, monkeypatch):
    monkeypatch.setattr(flash4_choice, *WAYS["blocks"])
    columns = [(0, 60, x, x + 2, -UNBOUNDED, UNBOUNDED) for x in range(0, 90, 10)]
    pairs = Pairs(normalise(as_slices(columns)), 60, 90)
    check(pairs, *draw(pairs))
    assert not any(used_blocks(library))


def test_deterministic_gradients_take_windows(library, monkeypatch):
    monkeypatch.setattr(flash4_choice, *WAYS["blocks"])
    pairs = pairs_of("streaming")
    check(pairs, *draw(pairs), deterministic=True)
    assert used_blocks(library) == [True, False, False]
    assert all(given["deterministic"] for name, given in library.calls if name.endswith("bwd"))


@pytest.mark.parametrize("capability", [(10, 0), (12, 0)])
def test_blocks_are_for_hopper(library, monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(flash4_choice, *WAYS["blocks"])
    pairs = pairs_of("streaming")
    check(pairs, *draw(pairs))
    assert not any(used_blocks(library))


def test_lists_are_made_once(library, monkeypatch):
    monkeypatch.setattr(flash4_choice, *WAYS["blocks"])
    pairs = pairs_of("streaming")
    tensors = draw(pairs)
    check(pairs, *tensors)
    monkeypatch.setattr(flash4_blocks, "block_lists", None)
    monkeypatch.setattr(steps, "lower", None)
    flash4.forward(ForwardOperands(*tensors[:3]), pairs, SCORINGS["plain"], None)
    mods = [given["mask_mod"] for _, given in library.calls]
    assert len(mods) == 3 and len(set(mods)) == 1, "another object is another kernel to compile"


def test_lists_that_were_made_ahead_travel(library, monkeypatch):
    monkeypatch.setattr(flash4_choice, *WAYS["blocks"])
    there = flash4_choice._is_installed.__wrapped__  # whatever an earlier test has found
    monkeypatch.setattr(flash4_choice, "_is_installed", there)
    pairs = pairs_of("streaming")
    flash4.prepare(pairs)
    monkeypatch.setattr(flash4_blocks, "block_lists", None)
    monkeypatch.setattr(flash4_choice, "blocks_touched", None)
    arrived = pickle.loads(pickle.dumps(pairs))
    ahead = flash4_choice.COMMON_DIM
    made = flash4_blocks.lists(arrived, ahead)
    assert made is not None
    assert set(map(id, made.tables)) <= set(map(id, flash4.tables(arrived)))
    assert not flash4_blocks.known_tables(arrived, 2 * ahead)  # nor are they made for that
    check(arrived, *draw(arrived))
    assert used_blocks(library) == [True, True]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["causal", "window", "documents", "streaming", "cut blocks"])
@pytest.mark.parametrize("way", WAYS)
def test_on_a_gpu(monkeypatch, kind, way):
    if flash4.missing() is not None or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip(flash4.missing() or "needs a Hopper GPU")
    monkeypatch.setattr(flash4_choice, *WAYS[way])
    pairs = pairs_of(kind)
    exact = [t.bfloat16().cuda() for t in draw(pairs, d=128, e=128)[:4]]
    scoring = Scoring(128**-0.5)
    want = reference.forward(ForwardOperands(*exact[:3]), pairs, scoring, None)
    got = flash4.forward(ForwardOperands(*exact[:3]), pairs, scoring, None)
    q, k, v, dout = exact
    operands = BackwardOperands(dout, q, k, v, want[0].to(q.dtype), want[1])
    given = (operands, pairs, scoring, None)
    wanted, gradients = reference.backward(*given), flash4.backward(*given)
    for name, mine, his in zip(
        ["out", "lse", "dq", "dk", "dv"], got + gradients, want + wanted, strict=True
    ):
        largest = his[his.isfinite()].abs().max().item()
        assert_same(name, mine, his, 2e-2 * largest)
