"""The kernel "flash4" over a dense stand-in for its library, and on GPUs over the library."""

import pickle
import sys

import numpy as np
import pytest
import torch
from dense import assert_same
from flash4_library import Library, install
from hypothesis import given, settings
from hypothesis import strategies as st
from slice_strategy import UNBOUNDED, grids_of_bands

from customized_ops.ring_attention.core.kernels import (
    BackwardOperands,
    ForwardOperands,
    Pairs,
    Request,
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

HEADS = 4
SCORINGS = {"plain": Scoring(0.35), "softcap": Scoring(0.35, softcap=1.5)}
# What makes either way the faster one, where there are several window calls.
WAYS = {"windows": ("BLOCK_FLOPS", (1.0, 1.0)), "blocks": ("CALL_SECONDS", 1e9)}

KINDS = {
    "full": (200, 300, [(0, 200, 0, 300, -UNBOUNDED, UNBOUNDED)]),
    "causal": (300, 300, [(0, 300, 0, 300, -UNBOUNDED, 0)]),
    "window": (300, 300, [(0, 300, 0, 300, -40, 7)]),
    "one row, one key": (1, 1, [(0, 1, 0, 1, 0, 0)]),
    "documents": (300, 300, [(a, b, a, b, -UNBOUNDED, 0) for a, b in [(0, 99), (120, 300)]]),
    "streaming": (400, 400, [(0, 400, 0, 9, -UNBOUNDED, 0), (9, 400, 9, 400, -150, 0)]),
    "two parts of a row": (
        260,
        390,
        [(0, 260, 0, 128, -UNBOUNDED, UNBOUNDED), (50, 260, 200, 390, -UNBOUNDED, 130)],
    ),
    "cut blocks": (
        256,
        256,
        [(0, 70, 0, 256, -UNBOUNDED, 9), (0, 70, 0, 256, 10, UNBOUNDED), (70, 256, 0, 256, -99, 9)],
    ),
    "five intervals": (
        140,
        270,
        [(0, 140, x, x + 20, -UNBOUNDED, UNBOUNDED) for x in range(0, 250, 50)],
    ),
    "no slices": (7, 9, []),
    "no rows": (0, 9, []),
    "no keys": (7, 0, []),
}


@pytest.fixture
def library(monkeypatch):
    """The stand-in, installed where the real library would be."""
    return make_library(monkeypatch)


def make_library(monkeypatch):
    library = Library()
    install(monkeypatch, library)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    flash4_blocks.attended.cache_clear()
    flash4.missing.cache_clear()
    return library


def draw(pairs, batch=2, kv_heads=2, d=8, e=8):
    """q, k, v, dout, dlse in fp64."""
    source = torch.Generator().manual_seed(pairs.q_len * 100 + pairs.k_len)
    rows, keys = pairs.q_len, pairs.k_len
    shapes = [(batch, rows, HEADS, d), (batch, keys, kv_heads, d), (batch, keys, kv_heads, e)]
    shapes += [(batch, rows, HEADS, e), (batch, HEADS, rows)]
    return [torch.randn(shape, dtype=torch.float64, generator=source) for shape in shapes]


def check(pairs, q, k, v, dout, dlse=None, scoring=SCORINGS["plain"], deterministic=False):
    """Forward and backward equal the reference's."""
    want = reference.forward(ForwardOperands(q, k, v), pairs, scoring, None)
    got = flash4.forward(ForwardOperands(q, k, v), pairs, scoring, None)
    for name, mine, his in zip(("out", "lse"), got, want, strict=True):
        assert_same(name, mine, his)
    given = (BackwardOperands(dout, q, k, v, *want, dlse), pairs, scoring, None)
    options = {"deterministic": deterministic}
    wanted = reference.backward(*given, **options)
    gradients = flash4.backward(*given, **options)
    for name, mine, his in zip(("dq", "dk", "dv"), gradients, wanted, strict=True):
        assert_same(name, mine, his)


def pairs_of(kind):
    rows, keys, slices = KINDS[kind]
    return Pairs(normalise(as_slices(slices)), rows, keys)


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


def test_every_argument_is_probed(library, monkeypatch):
    monkeypatch.setattr(flash4_choice, *WAYS["blocks"])
    for kind in ("documents", "streaming"):
        pairs = pairs_of(kind)
        check(pairs, *draw(pairs))
    for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
        used = set().union(*(given for called, given in library.calls if called == name))
        assert used == set(flash4.NEEDS[f"flash_attn.cute.interface.{name}"])


def test_nothing_is_missing(library):
    assert flash4.missing() is None


def test_missing_names_what_the_installed_version_lacks(monkeypatch):
    interface = install(monkeypatch, Library())
    monkeypatch.setattr(interface, "_flash_attn_bwd", lambda q, k, v: None)
    flash4.missing.cache_clear()
    reason = flash4.missing()
    flash4.missing.cache_clear()
    assert "_flash_attn_bwd takes no out, dout" in reason and "dlse" in reason


def test_missing_names_what_block_lists_need(monkeypatch):
    install(monkeypatch, Library())
    monkeypatch.delattr(sys.modules["flash_attn.cute.utils"], "scalar_to_ssa")
    flash4.missing.cache_clear()
    reason = flash4.missing()
    flash4.missing.cache_clear()
    assert reason == "flash_attn.cute.utils has no scalar_to_ssa; that of 4.0.0b36 does"


def test_missing_says_what_to_install(monkeypatch):
    monkeypatch.setattr(flash4.importlib.util, "find_spec", lambda name: None)
    flash4.missing.cache_clear()
    reason = flash4.missing()
    flash4.missing.cache_clear()
    assert reason == "flash_attn.cute is not installed; pip install --pre flash-attn-4"


def test_a_broken_installation_is_missing(monkeypatch):
    install(monkeypatch, Library())
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
    flash4.missing.cache_clear()
    with pytest.warns(UserWarning, match="does not import .* Slower kernels take its place"):
        reason = flash4.missing()
    flash4.missing.cache_clear()
    assert "does not import" in reason


def request(d=128, e=None, *features, dtype=torch.bfloat16, heads=(8, 2)):
    device = torch.device("cuda")
    return Request(device, dtype, d, d if e is None else e, *heads, features=features)


# capability of the GPU, request, what the refusal says or None
REQUESTS = {
    "plain": ((9, 0), request(), None),
    "fp16": ((9, 0), request(dtype=torch.float16), None),
    "all it has": ((9, 0), request(128, 128, "softcap", "lse gradient", "deterministic"), None),
    "256": ((9, 0), request(256, 256, "softcap", "lse gradient"), None),
    "192 and 128": ((9, 0), request(192, 128, heads=(8, 8)), None),
    "192 and 128, grouped": ((9, 0), request(192, 128), None),
    "other widths": ((9, 0), request(128, 64, heads=(8, 8)), None),
    "odd": ((9, 0), request(68), "multiples of 8"),
    "wide": ((9, 0), request(512), "up to 256 and 256"),
    "fp32": ((9, 0), request(dtype=torch.float32), "not torch.float32"),
    "alibi": ((9, 0), request(128, 128, "alibi"), "has no alibi"),
    "old GPU": ((8, 0), request(), "needs compute capability 9.0"),
    "Blackwell": ((10, 0), request(), None),
    "Blackwell, 192 and 128": ((10, 0), request(192, 128, heads=(8, 8)), None),
    "Blackwell, 192 and 128, grouped": ((10, 0), request(192, 128), "up to 128, 192 and 128"),
    "Blackwell, other widths": ((10, 0), request(128, 64), None),
    "Blackwell, 192": ((10, 0), request(192), "up to 128, 192 and 128, or 256"),
    "Blackwell, 256": ((10, 0), request(256), None),
    "Blackwell, 256, softcap": ((10, 0), request(256, 256, "softcap"), "no softcap for head dim"),
    "desktop Blackwell": ((12, 0), request(), "not made for compute capability 12"),
}


@pytest.mark.parametrize("case", REQUESTS)
def test_capabilities(monkeypatch, case):
    capability, asked, reason = REQUESTS[case]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    refusal = flash4.CAPABILITIES[0].refuses(asked)
    assert refusal is None if reason is None else reason in refusal


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
