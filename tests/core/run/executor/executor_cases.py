"""Masks, layouts and scorings that several tests of the executor run."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import event
from hypothesis import strategies as st
from torch import Tensor

from customized_ops.ring_attention.core.kernels import KERNELS, Request, Scoring, refusal
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask


def global_and_local(tokens: int, globals_: int, window: int) -> AttnMask:
    """The first rows attend everything, everything attends them, and a causal window beside."""
    rows = [
        (0, globals_, 0, tokens, -tokens, tokens),
        (globals_, tokens, 0, globals_, -tokens, tokens),
        (globals_, tokens, globals_, tokens, -window, 0),
    ]
    return AttnMask.from_slices(rows, tokens, tokens)


def tiny_documents(count: int) -> AttnMask:
    """Documents of 1, 2 or 3 tokens."""
    lengths = np.random.default_rng(0).integers(1, 4, count)
    return AttnMask.varlen(np.concatenate([[0], np.cumsum(lengths)]), causal=True)


# name: mask, q layout, k layout (None: as q)
CASES = {
    "slices one key wide": (
        AttnMask.from_slices([(n, 40, n, n + 1, -40, 40) for n in range(0, 40, 3)], 40, 40),
        Layout.contiguous(40, 4),
        None,
    ),
    "slices one row high": (
        AttnMask.from_slices([(n, n + 1, 39 - n, 40, -40, 40) for n in range(0, 40, 3)], 40, 40),
        Layout.zigzag(40, 4),
        None,
    ),
    "ranges shorter than a rank": (
        AttnMask.varlen([0, 1, 3, 4, 9, 11, 12, 40], causal=True),
        Layout.contiguous(40, 2),
        None,
    ),
    "tiny documents": (tiny_documents(60), Layout.zigzag(tiny_documents(60).q_len, 8), None),
    "slices share rows": (
        AttnMask.from_slices(
            [
                (0, 30, 0, 6, -40, 40),
                (4, 40, 6, 20, -40, 0),
                (10, 25, 30, 36, 7, 21),
                (8, 36, 38, 40, -40, 40),
            ],
            40,
            40,
        ),
        Layout.contiguous(40, 4),
        None,
    ),
    "all rows of a rank attend nothing": (
        AttnMask.from_slices([(0, 10, 0, 40, -40, 40), (20, 40, 5, 25, -40, 40)], 40, 40),
        Layout.contiguous(40, 4),
        None,
    ),
    "no keys of a rank are attended": (
        AttnMask.from_slices([(0, 40, 10, 40, -40, 40)], 40, 40),
        Layout.contiguous(40, 4),
        None,
    ),
    "everything on one rank": (
        AttnMask.dense(40, causal=True),
        Layout.from_sizes([0, 0, 40, 0]),
        None,
    ),
    "queries on one rank, keys on another": (
        AttnMask.dense(40, 30),
        Layout.from_sizes([0, 0, 40, 0]),
        Layout.from_sizes([30, 0, 0, 0]),
    ),
    "few queries": (AttnMask.dense(6, 90), Layout.contiguous(6, 4), Layout.contiguous(90, 4)),
    "few queries, other layouts": (
        AttnMask.dense(6, 90, causal=True),
        Layout.from_sizes([1, 0, 5, 0]),
        Layout.zigzag(90, 4),
    ),
    "global rows": (global_and_local(64, 2, 5), Layout.contiguous(64, 4), None),
    "global rows, zigzag": (global_and_local(64, 3, 9), Layout.zigzag(64, 8), None),
}


def slopes(batch: int, heads: int) -> Tensor:
    """fp32 [batch, heads], all different; multiples of 1/64, so that fp32 holds slope x distance
    exactly and it does not matter where it is widened."""
    return (torch.arange(batch * heads, dtype=torch.float32) + 1).view(batch, heads) / 64


SEED = torch.tensor([0x1234_5678_9ABC])


@st.composite
def masks(draw) -> AttnMask:
    kind = draw(st.sampled_from(["dense", "window", "packed", "slices"]))
    event(f"mask: {kind}")
    if kind == "packed":
        return draw(packed())
    q_len = draw(st.integers(0, 40))
    k_len = draw(st.one_of(st.just(q_len), st.integers(0, 40)))
    if kind == "slices":
        return draw(disjoint_slices(q_len, k_len))
    edge = st.integers(-1, 12)
    window = draw(st.tuples(edge, edge)) if kind == "window" else (-1, -1)
    return AttnMask.dense(q_len, k_len, causal=draw(st.booleans()), window=window)


@st.composite
def packed(draw) -> AttnMask:
    """Documents, some of them empty, the keys now and then of other lengths."""
    lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=5))
    k_lengths = lengths
    if draw(st.booleans()):
        count = len(lengths)
        k_lengths = draw(st.lists(st.integers(0, 12), min_size=count, max_size=count))
    window = draw(st.sampled_from([(-1, -1), (3, 1), (0, 4)]))
    ends, k_ends = (np.cumsum([0, *values]) for values in (lengths, k_lengths))
    return AttnMask.varlen(ends, k_ends, causal=draw(st.booleans()), window=window)


@st.composite
def disjoint_slices(draw, q_len: int, k_len: int) -> AttnMask:
    """Any slices, less those that meet one before them."""
    taken = np.zeros((q_len, k_len), dtype=bool)
    diagonal = np.arange(k_len)[None, :] - np.arange(q_len)[:, None]
    rows = []
    for _ in range(draw(st.integers(0, 6))):
        q0, q1 = sorted(draw(st.tuples(st.integers(0, q_len), st.integers(0, q_len))))
        k0, k1 = sorted(draw(st.tuples(st.integers(0, k_len), st.integers(0, k_len))))
        lo, hi = draw(st.tuples(st.integers(-45, 20), st.integers(-20, 45)))
        pairs = np.zeros_like(taken)
        pairs[q0:q1, k0:k1] = ((diagonal >= lo) & (diagonal <= hi))[q0:q1, k0:k1]
        if not (pairs & taken).any():
            taken |= pairs
            rows.append((q0, q1, k0, k1, lo, hi))
    mask = AttnMask.from_slices(rows, q_len, k_len)
    assert (mask.to_dense() == taken).all()
    return mask


@st.composite
def layouts(draw, total: int, group_size: int) -> Layout:
    kind = draw(st.sampled_from(["contiguous", "zigzag", "sizes"]))
    if kind != "sizes":
        return getattr(Layout, kind)(total, group_size)
    cut = st.integers(0, total)
    cuts = sorted(draw(st.lists(cut, min_size=group_size - 1, max_size=group_size - 1)))
    return Layout.from_sizes(np.diff([0, *cuts, total]).tolist())


def refuses(kernel: str, tensors: list[Tensor], scoring: Scoring) -> str | None:
    (q, k, v), features = tensors[:3], scoring.features
    heads = q.shape[2], k.shape[2]
    request = Request(q.device, q.dtype, q.shape[-1], v.shape[-1], *heads, features)
    return refusal(KERNELS[kernel], request)
