"""Layouts by their constructors: who holds which tokens, and tensors cut and joined."""

import itertools
import math
import time

import numpy as np
import pytest
import torch
from dense import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.layout.layout_value import FEW_RANGES
from customized_ops.ring_attention.core.mask import AttnMask

from .layout_cases import assert_every_token_is_held_once

CAUSAL_DOCS = AttnMask.varlen([0, 3, 30, 41], causal=True)
LAYOUTS = [
    Layout.contiguous(8, 2),
    Layout.contiguous(5, 4),  # the last rank holds nothing
    Layout.contiguous(2, 8),
    Layout.contiguous(0, 3),
    Layout.zigzag(8, 2),
    Layout.zigzag(11, 3),
    Layout.zigzag(3, 4),
    Layout.zigzag(0, 2),
    Layout.zigzag(12, 2, [0, 4, 12]),
    Layout.zigzag(13, 3, [0, 1, 1, 8, 13]),
    Layout.striped(11, 3),
    Layout.striped(11, 3, 2),
    Layout.striped(2, 4),
    Layout.striped(0, 4),
    Layout.striped(100, 2),  # more ranges than are cut and joined
    Layout.balanced(CAUSAL_DOCS, 3, 4),
    Layout.balanced(AttnMask.dense(0), 3),
    Layout.from_chunks(7, 3, 2, [2, 0, 2, 0]),
    Layout.from_ranges([[(4, 6), (0, 2)], [], [(2, 4), (7, 7), (6, 9)]]),
    Layout.from_ranges([[]]),
    Layout.from_sizes([3, 0, 4, 1]),
    Layout.from_sizes([0, 0, 5]),
    Layout.from_sizes([6]),
    Layout.from_sizes([0]),
]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 5, 7, 8, 16])
def test_contiguous_is_torch_chunk(group_size):
    """Which is what DTensor's Shard holds; torch.chunk leaves out empty chunks at the end."""
    for total in [*range(1, 40), 100, 127, 128, 1000]:
        chunks = [chunk.tolist() for chunk in torch.arange(total).chunk(group_size)]
        chunks += [[]] * (group_size - len(chunks))
        layout = Layout.contiguous(total, group_size)
        assert [layout.positions(r).tolist() for r in range(group_size)] == chunks
        assert layout.sizes == tuple(len(chunk) for chunk in chunks)


def test_contiguous_with_fewer_tokens_than_ranks():
    assert Layout.contiguous(2, 4).sizes == (1, 1, 0, 0)
    assert Layout.contiguous(0, 4).sizes == (0, 0, 0, 0)
    assert Layout.contiguous(9, 4).sizes == (3, 3, 3, 0)


@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 8])
def test_zigzag_holds_a_chunk_and_its_mirror_image(group_size):
    for chunk in (1, 2, 5):
        chunks = np.arange(2 * group_size * chunk).reshape(2 * group_size, chunk)
        layout = Layout.zigzag(chunks.size, group_size)
        for rank in range(group_size):
            want = [*chunks[rank], *chunks[2 * group_size - 1 - rank]]
            assert layout.positions(rank).tolist() == want


def test_zigzag_of_uneven_lengths():
    layout = Layout.zigzag(7, 2)
    assert [layout.positions(r).tolist() for r in (0, 1)] == [[0, 1, 6], [2, 3, 4, 5]]
    layout = Layout.zigzag(3, 4)
    assert [layout.positions(r).tolist() for r in range(4)] == [[0], [1], [2], []]


def zigzag_documents(group_size, cu_seqlens):
    """By definition: document after document, of each the front chunk and its mirror image."""
    held = [[] for _ in range(group_size)]
    for start, stop in itertools.pairwise(cu_seqlens):
        length, chunks = stop - start, 2 * group_size
        bounds = [start + math.floor(i * length / chunks) for i in range(chunks + 1)]
        for rank in range(group_size):
            held[rank] += range(bounds[rank], bounds[rank + 1])
            held[rank] += range(bounds[chunks - 1 - rank], bounds[chunks - rank])
    return held


@given(st.integers(1, 6), st.lists(st.integers(0, 30), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_zigzag_of_documents(group_size, lengths):
    cu_seqlens = [0, *itertools.accumulate(lengths)]
    layout = Layout.zigzag(cu_seqlens[-1], group_size, cu_seqlens)
    held = [layout.positions(rank).tolist() for rank in range(group_size)]
    assert held == zigzag_documents(group_size, cu_seqlens)
    arrays = np.array(cu_seqlens, dtype=np.int32), torch.tensor(cu_seqlens)
    assert all(Layout.zigzag(cu_seqlens[-1], group_size, each) == layout for each in arrays)


def test_zigzag_of_one_even_document_is_zigzag():
    assert Layout.zigzag(24, 3, [0, 24]) == Layout.zigzag(24, 3)


@pytest.mark.parametrize("block", [1, 2, 5])
@pytest.mark.parametrize("total", [0, 1, 7, 40])
def test_striped_assigns_blocks(total, block):
    for group_size in (1, 2, 3, 8):
        layout = Layout.striped(total, group_size, block)
        for rank in range(group_size):
            want = [i for i in range(total) if (i // block) % group_size == rank]
            assert layout.positions(rank).tolist() == want


def test_a_million_ranges():
    start = time.process_time()  # however busy the machine is
    layout = Layout.striped(1 << 20, 8)
    assert time.process_time() - start < 10  # seconds; 0.3 where measured
    assert len(layout.pieces) == 1 << 20
    assert layout.sizes == (1 << 17,) * 8
    assert np.array_equal(layout.positions(5), np.arange(5, 1 << 20, 8))
    assert Layout.parse("striped:1048576:8:1") == layout


def test_from_chunks():
    layout = Layout.from_chunks(7, 3, 2, [2, 0, 2, 0])
    assert [layout.positions(r).tolist() for r in range(3)] == [[2, 3, 6], [], [0, 1, 4, 5]]


def test_from_ranges_keeps_the_local_order_and_joins_neighbours():
    layout = Layout.from_ranges([[(4, 6), (0, 2)], [], [(2, 3), (3, 4), (7, 7), (6, 9)]])
    assert layout.ranges == (((4, 6), (0, 2)), (), ((2, 4), (6, 9)))
    assert [layout.positions(r).tolist() for r in (0, 2)] == [[4, 5, 0, 1], [2, 3, 6, 7, 8]]
    assert layout.spec == "ranges:4-6,0-2;;2-4,6-9"
    assert layout.table.tolist() == [[0, 4, 6], [0, 0, 2], [2, 2, 4], [2, 6, 9]]


def test_from_sizes():
    layout = Layout.from_sizes([2, 0, 3])
    assert [layout.positions(r).tolist() for r in range(3)] == [[0, 1], [], [2, 3, 4]]
    assert (layout.sizes, layout.total, layout.group_size) == ((2, 0, 3), 5, 3)
    assert layout.positions(1).dtype == np.int64


@layouts
def test_every_token_is_held_once(layout):
    assert_every_token_is_held_once(layout)


def test_a_token_held_twice_would_be_seen():
    layout = Layout.contiguous(4, 2)
    layout.__dict__["table"] = np.array([[0, 0, 2], [1, 1, 3]])
    with pytest.raises(AssertionError):
        assert_every_token_is_held_once(layout)


@layouts
def test_pieces_tile_the_sequence(layout):
    end = 0
    for rank, start, stop, offset in layout.pieces.tolist():
        assert start == end < stop
        end = stop
        own = layout.positions(rank)
        assert own[offset : offset + stop - start].tolist() == list(range(start, stop))
    assert end == layout.total
    with pytest.raises(ValueError, match="read-only"):
        layout.pieces[:] = 0
    with pytest.raises(ValueError, match="read-only"):
        layout.table[:] = 0


@layouts
def test_ranges_are_what_positions_are(layout):
    for rank, own in enumerate(layout.ranges):
        assert all(start < stop for start, stop in own)
        assert all(a[1] != b[0] for a, b in itertools.pairwise(own))
        tokens = [token for start, stop in own for token in range(start, stop)]
        assert tokens == layout.positions(rank).tolist()
    assert Layout.from_ranges(layout.ranges) == layout


@pytest.mark.covering(1)
@layouts
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_shard_and_unshard(layout, dim):
    shape = [2, 3]
    shape.insert(dim if dim >= 0 else 2, layout.total)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    shards = [layout.shard(x, r, dim) for r in range(layout.group_size)]
    for rank, shard in enumerate(shards):
        positions = torch.from_numpy(layout.positions(rank))
        assert torch.equal(shard, x.index_select(dim, positions))
    whole = layout.unshard(shards, dim)
    assert torch.equal(whole, x)
    weight = torch.randn_like(x)
    (grad,) = torch.autograd.grad((whole * weight).sum(), x)
    assert torch.equal(grad, weight)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int32, torch.int64, torch.bfloat16, torch.complex64], ids=str
)
def test_shard_and_unshard_any_dtype(dtype):
    for layout in (Layout.zigzag(70, 2), Layout.striped(70, 2)):
        x = torch.randint(0, 2, (70, 3)).to(dtype)
        shards = [layout.shard(x, rank, -2) for rank in range(2)]
        assert torch.equal(shards[1], x[layout.positions(1)])
        whole = layout.unshard(shards, -2)
        assert whole.dtype == dtype and torch.equal(whole, x)


@pytest.mark.parametrize(
    "layout", [Layout.zigzag(6, 2), Layout.striped(2 * FEW_RANGES + 2, 2)], ids=str
)
def test_shard_and_unshard_gradients(layout):
    x = torch.randn(2, layout.total, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: layout.shard(t, 1), (x,))
    shards = [layout.shard(x, r).detach().requires_grad_() for r in (0, 1)]
    assert torch.autograd.gradcheck(lambda *parts: layout.unshard(parts), shards)
    (grad,) = torch.autograd.grad(layout.shard(x, 0).sum(), x)
    want = torch.zeros_like(x)
    want[:, layout.positions(0)] = 1
    assert_same("gradient of one shard", grad, want, 0.0)


def test_shard_of_one_range_is_a_view():
    x = torch.zeros(1, 8, 2)
    assert Layout.contiguous(8, 2).shard(x, 1).data_ptr() == x[:, 4:].data_ptr()
