import itertools

import numpy as np
import pytest
import torch
from dense import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

from customized_ops.ring_attention.core.layout import Layout, LayoutError

LAYOUTS = [
    Layout.contiguous(8, 2),
    Layout.contiguous(5, 4),  # the last rank holds nothing
    Layout.contiguous(2, 8),
    Layout.contiguous(0, 3),
    Layout.zigzag(8, 2),
    Layout.zigzag(11, 3),
    Layout.zigzag(3, 4),
    Layout.zigzag(0, 2),
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


def test_from_sizes():
    layout = Layout.from_sizes([2, 0, 3])
    assert [layout.positions(r).tolist() for r in range(3)] == [[0, 1], [], [2, 3, 4]]
    assert (layout.sizes, layout.total, layout.group_size) == ((2, 0, 3), 5, 3)
    assert layout.positions(1).dtype == np.int64


@layouts
def test_every_token_is_held_once(layout):
    held = [layout.positions(r).tolist() for r in range(layout.group_size)]
    assert sorted(itertools.chain(*held)) == list(range(layout.total))
    assert layout.sizes == tuple(len(own) for own in held)


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


def test_shard_and_unshard_gradients():
    layout = Layout.zigzag(6, 2)
    x = torch.randn(2, 6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: layout.shard(t, 1), (x,))
    shards = [layout.shard(x, r).detach().requires_grad_() for r in (0, 1)]
    assert torch.autograd.gradcheck(lambda *parts: layout.unshard(parts), shards)
    (grad,) = torch.autograd.grad(layout.shard(x, 0).sum(), x)
    want = torch.tensor([1.0, 1, 0, 0, 0, 0]).view(1, 6, 1).expand(2, 6, 2)
    assert_same("gradient of one shard", grad, want, 0.0)


def test_shard_of_one_range_is_a_view():
    x = torch.zeros(1, 8, 2)
    assert Layout.contiguous(8, 2).shard(x, 1).data_ptr() == x[:, 4:].data_ptr()


numbers = st.integers(0, 200), st.integers(1, 9)
any_layout = st.one_of(
    st.builds(Layout.contiguous, *numbers),
    st.builds(Layout.zigzag, *numbers),
    st.builds(Layout.from_sizes, st.lists(st.integers(0, 50), min_size=1, max_size=9)),
)


@given(any_layout)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_spec_parses_back(layout):
    again = Layout.parse(layout.spec)
    assert again == layout and again.spec == layout.spec == str(layout)
    assert hash(again) == hash(layout)


def test_equality_is_by_what_ranks_hold():
    assert Layout.contiguous(8, 2) == Layout.from_sizes([4, 4])
    assert hash(Layout.contiguous(8, 2)) == hash(Layout.from_sizes([4, 4]))
    assert Layout.contiguous(8, 2) != Layout.zigzag(8, 2)
    assert Layout.contiguous(8, 2) != Layout.from_sizes([4, 4, 0])
    assert Layout.contiguous(8, 2) != Layout.contiguous(8, 2).ranges


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout.contiguous(-1, 2), "cannot lay -1 tokens over 2 chunks"),
        (lambda: Layout.contiguous(8, 0), "cannot lay 8 tokens over 0 chunks"),
        (lambda: Layout.zigzag(-1, 2), "cannot lay -1 tokens over 4 chunks"),
        (lambda: Layout.zigzag(8, 0), "cannot lay 8 tokens over 0 chunks"),
        (
            lambda: Layout.from_sizes([]),
            "Layout.from_sizes: sizes must be 0 or more, one a rank, got []",
        ),
        (
            lambda: Layout.from_sizes([2, -1]),
            "Layout.from_sizes: sizes must be 0 or more, one a rank, got [2, -1]",
        ),
        (
            lambda: Layout.parse("striped:8:2"),
            "unknown layout 'striped:8:2'; known: contiguous, zigzag, sizes",
        ),
        (lambda: Layout.parse(""), "unknown layout ''; known: contiguous, zigzag, sizes"),
        (
            lambda: Layout.zigzag(8, 2).shard(torch.zeros(2, 6, 4), 0),
            "dim 1 of (2, 6, 4) is not the layout's 8 tokens",
        ),
    ],
)
def test_errors(make, message):
    with pytest.raises(LayoutError) as info:
        make()
    assert str(info.value) == message
    assert isinstance(info.value, ValueError)
