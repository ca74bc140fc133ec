"""Masks for the kernel of flash-attn-4, and dense attention to compare it with."""

import windows
from dense import assert_same
from flash4_library import Library, install
from slice_strategy import UNBOUNDED

from customized_ops.ring_attention.core.kernels import (
    BackwardOperands,
    ForwardOperands,
    Pairs,
    Scoring,
)
from customized_ops.ring_attention.core.kernels.adapters import flash4, reference
from customized_ops.ring_attention.core.mask.slices import as_slices, normalise

HEADS = windows.HEADS
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


def make_library(monkeypatch):
    """The stand-in, installed where the real library would be."""
    library = Library()
    install(monkeypatch, library)
    return library


def draw(pairs, batch=2, kv_heads=2, d=8, e=8):
    """q, k, v, dout, dlse in fp64."""
    return windows.draw(batch, pairs.q_len, pairs.k_len, kv_heads, d, e)


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
