import itertools
import math
import time

import numpy as np
import pytest
import torch
from dense import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

from customized_ops.ring_attention.core.layout import Layout, LayoutError
from customized_ops.ring_attention.core.layout.layout_value import FEW_RANGES
from customized_ops.ring_attention.core.mask import AttnMask

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


def assert_every_token_is_held_once(layout):
    held = [layout.positions(r).tolist() for r in range(layout.group_size)]
    assert sorted(itertools.chain(*held)) == list(range(layout.total))
    assert layout.sizes == tuple(len(own) for own in held)


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


numbers = st.integers(0, 200), st.integers(1, 9)


@st.composite
def drawn_documents(draw):
    return [0, *itertools.accumulate(draw(st.lists(st.integers(0, 40), min_size=1, max_size=6)))]


@st.composite
def zigzag_layouts(draw):
    cu_seqlens = draw(drawn_documents())
    return Layout.zigzag(cu_seqlens[-1], draw(st.integers(1, 5)), cu_seqlens)


@st.composite
def balanced_layouts(draw):
    mask = AttnMask.varlen(draw(drawn_documents()), causal=draw(st.booleans()))
    return Layout.balanced(mask, draw(st.integers(1, 3)), draw(st.integers(8, 60)))


@st.composite
def chunk_layouts(draw):
    total, group_size, chunk = draw(numbers[0]), draw(numbers[1]), draw(st.integers(1, 50))
    ranks = st.integers(0, group_size - 1)
    chunks = -(-total // chunk)
    assigned = draw(st.lists(ranks, min_size=chunks, max_size=chunks))
    return Layout.from_chunks(total, group_size, chunk, assigned)


@st.composite
def range_layouts(draw):
    cuts = sorted(draw(st.lists(st.integers(0, 100), min_size=2, max_size=12)))
    pairs = list(itertools.pairwise([0, *cuts]))
    ranges = [[] for _ in range(draw(st.integers(1, 4)))]
    for pair in draw(st.permutations(pairs)):
        draw(st.sampled_from(ranges)).append(pair)
    return Layout.from_ranges(ranges)


any_layout = st.one_of(
    st.builds(Layout.contiguous, *numbers),
    st.builds(Layout.zigzag, *numbers),
    st.builds(Layout.striped, *numbers, st.integers(1, 20)),
    st.builds(Layout.from_sizes, st.lists(st.integers(0, 50), min_size=1, max_size=9)),
    zigzag_layouts(),
    balanced_layouts(),
    chunk_layouts(),
    range_layouts(),
)


@given(any_layout)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_layout_tiles_and_its_spec_parses_back(layout):
    assert_every_token_is_held_once(layout)
    again = Layout.parse(layout.spec)
    assert again == layout and again.spec == layout.spec
    assert hash(again) == hash(layout)
    assert Layout.parse(layout.spec) is again


@pytest.mark.parametrize(
    ("layout", "spec"),
    [
        (Layout.contiguous(8, 2), "contiguous:8:2"),
        (Layout.zigzag(8, 2), "zigzag:8:2"),
        (Layout.zigzag(8, 2, [0, 3, 8]), "zigzag:8:2:0,3,8"),
        (Layout.striped(8, 2), "striped:8:2:1"),
        (Layout.from_sizes([3, 0, 5]), "sizes:3,0,5"),
        (Layout.from_chunks(7, 3, 2, [2, 0, 2, 0]), "chunks:7:3:2:2,0,2,0"),
        (Layout.balanced(AttnMask.dense(8, causal=True), 2, 2), "chunks:8:2:2:0,1,1,0"),
        (Layout.from_ranges([[(0, 4), (8, 12)], [(4, 8)]]), "ranges:0-4,8-12;4-8"),
    ],
    ids=str,
)
def test_spec(layout, spec):
    assert layout.spec == spec == str(layout)
    assert repr(layout) == f"Layout({spec})"


def test_a_long_spec_is_shown_short():
    layout = Layout.from_sizes(range(100))
    assert len(layout.spec) > 200
    assert repr(layout) == f"Layout({layout.spec[:57]}...)"


def test_equality_is_by_what_ranks_hold():
    assert Layout.contiguous(8, 2) == Layout.from_sizes([4, 4])
    assert hash(Layout.contiguous(8, 2)) == hash(Layout.from_sizes([4, 4]))
    assert Layout.contiguous(8, 2) != Layout.zigzag(8, 2)
    assert Layout.contiguous(8, 2) != Layout.from_sizes([4, 4, 0])
    assert Layout.contiguous(8, 2) != Layout.contiguous(8, 2).ranges
    assert Layout.zigzag(8, 1) == Layout.contiguous(8, 1) == Layout.striped(8, 1)
    assert Layout.from_ranges([[(4, 8), (0, 4)]]) != Layout.from_ranges([[(0, 4), (4, 8)]])


KNOWN = "known: contiguous, zigzag, striped, sizes, chunks, ranges"
SQUARE = AttnMask.dense(8)


def message_of(make):
    with pytest.raises(LayoutError) as info:
        make()
    assert isinstance(info.value, ValueError)
    return str(info.value)


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_errors_in_lengths(kind):
    make, name = getattr(Layout, kind), f"Layout.{kind}"
    least0, least1 = "must be an integer of at least 0", "must be an integer of at least 1"
    assert message_of(lambda: make(-1, 2)) == f"{name}: total {least0}, got -1"
    assert message_of(lambda: make(8.5, 2)) == f"{name}: total {least0}, got 8.5"
    assert message_of(lambda: make(8, 0)) == f"{name}: group_size {least1}, got 0"


CU_SEQLENS = "Layout.zigzag: cu_seqlens must be integers from 0 to total, 8, got"
SIZES = "Layout.from_sizes: sizes must be 0 or more, one a rank, got"
RANK_OF = "Layout.from_chunks: rank_of must be 4 ranks below 2, got"
MASK = "Layout.balanced: mask must be an AttnMask or pairs (AttnMask, weight), got"
SELF = "Layout.balanced: mask must be of self-attention, masks of one length, got"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout.zigzag(8, 2, [0, 9]), f"{CU_SEQLENS} [0, 9]"),
        (
            lambda: Layout.zigzag(8, 2, [0, 5, 4, 8]),
            "Layout.zigzag: cu_seqlens[2] = 4 is below cu_seqlens[1] = 5; "
            "cumulative lengths never fall",
        ),
        (
            lambda: Layout.zigzag(300, 2, [*range(201), 150, 300]),
            "Layout.zigzag: cu_seqlens[201] = 150 is below cu_seqlens[200] = 200; "
            "cumulative lengths never fall",
        ),
        (lambda: Layout.zigzag(8, 2, []), f"{CU_SEQLENS} []"),
        (lambda: Layout.zigzag(8, 2, [0, 2.5, 8]), f"{CU_SEQLENS} [0, 2.5, 8]"),
        (
            lambda: Layout.striped(8, 2, 0),
            "Layout.striped: block must be an integer of at least 1, got 0",
        ),
        (lambda: Layout.from_sizes([]), f"{SIZES} []"),
        (lambda: Layout.from_sizes([2, -1]), f"{SIZES} [2, -1]"),
        (lambda: Layout.from_sizes([2, 1.5]), f"{SIZES} [2, 1.5]"),
        (lambda: Layout.from_chunks(7, 2, 2, [0, 1, 0]), f"{RANK_OF} [0, 1, 0]"),
        (lambda: Layout.from_chunks(7, 2, 2, [0, 1, 0, 2]), f"{RANK_OF} [0, 1, 0, 2]"),
        (
            lambda: Layout.from_chunks(7, 2, 0, []),
            "Layout.from_chunks: chunk must be an integer of at least 1, got 0",
        ),
        (
            lambda: Layout.from_ranges([]),
            "Layout.from_ranges: ranges must be one sequence a rank, got none",
        ),
        (
            lambda: Layout.from_ranges([[(0, 4)], [(4, 6), (7,)]]),
            "Layout.from_ranges: ranges[1] must be (start, stop) pairs of ints, got [(4, 6), (7,)]",
        ),
        (
            lambda: Layout.from_ranges([[(0, 4)], [(5, 8)]]),
            "no rank holds token 4; the next one held is in range (5, 8) of rank 1",
        ),
        (
            lambda: Layout.from_ranges([[(1, 4)]]),
            "no rank holds token 0; the next one held is in range (1, 4) of rank 0",
        ),
        (
            lambda: Layout.from_ranges([[(0, 4)], [(3, 8)]]),
            "token 3 is held twice: by rank 0 and in range (3, 8) of rank 1",
        ),
        (
            lambda: Layout.from_ranges([[(0, 8)], [(3, 5)]]),
            "token 3 is held twice: by rank 0 and in range (3, 5) of rank 1",
        ),
        (
            lambda: Layout.from_ranges([[(4, 2)]]),
            "range (4, 2) of rank 0 ends before it starts",
        ),
        (lambda: Layout.from_ranges([[(-2, 2)]]), "range (-2, 2) of rank 0 starts below 0"),
        (
            lambda: Layout.balanced(SQUARE, 0),
            "Layout.balanced: group_size must be an integer of at least 1, got 0",
        ),
        (
            lambda: Layout.balanced(SQUARE, 2, 0),
            "Layout.balanced: chunk must be an integer of at least 1, got 0",
        ),
        (
            lambda: Layout.contiguous(8, 2).shard([0] * 8, 0),  # type: ignore[arg-type]
            "Layout.shard: x must be a tensor, got [0, 0, 0, 0, 0, 0, ...]",
        ),
        (
            lambda: Layout.contiguous(8, 2).shard(torch.arange(8), 0),
            "Layout.shard: x must have a dim 1 for its tokens (dim= names another), got (8,)",
        ),
        (
            lambda: Layout.contiguous(8, 2).unshard(None),  # type: ignore[arg-type]
            "Layout.unshard: shards must be a list of 2 tensors, got None",
        ),
        (
            lambda: Layout.contiguous(8, 2).positions("a"),  # type: ignore[arg-type]
            "rank must be in 0..1, got 'a'",
        ),
        (
            lambda: Layout.balanced(SQUARE, 2, topology="2x1"),  # type: ignore[arg-type]
            "Layout.balanced: topology must be a Topology or None, got '2x1'",
        ),
        (lambda: Layout.balanced("causal", 2), f"{MASK} causal"),
        (lambda: Layout.balanced([], 2), f"{MASK} []"),
        (lambda: Layout.balanced([("causal", 2)], 2), f"{MASK} [('causal', 2)]"),
        (lambda: Layout.balanced(AttnMask.dense(8, 9), 2), f"{SELF} 8 x 9"),
        (
            lambda: Layout.balanced([(SQUARE, 1), (AttnMask.dense(9), 1)], 2),
            f"{SELF} 8 x 8, 9 x 9",
        ),
        (
            lambda: Layout.balanced([(SQUARE, 1), (SQUARE, 0)], 2),
            "Layout.balanced: weights must be positive, got 0.0",
        ),
        (lambda: Layout.parse("spiral:8:2"), f"unknown layout 'spiral:8:2'; {KNOWN}"),
        (lambda: Layout.parse(""), f"unknown layout ''; {KNOWN}"),
        (
            lambda: Layout.parse("striped:8:2"),
            "'striped:8:2' is not the spec of a layout; expected striped:TOTAL:RANKS:BLOCK",
        ),
        (
            lambda: Layout.parse("zigzag:8:two"),
            "'zigzag:8:two' is not the spec of a layout; "
            "expected zigzag:TOTAL:RANKS or zigzag:TOTAL:RANKS:CU_SEQLENS",
        ),
        (
            lambda: Layout.parse("chunks:8:2:2"),
            "'chunks:8:2:2' is not the spec of a layout; "
            "expected chunks:TOTAL:RANKS:CHUNK:RANK,RANK,...",
        ),
        (
            lambda: Layout.parse("ranges:0-4-5"),
            "'ranges:0-4-5' is not the spec of a layout; "
            "expected ranges:START-STOP,START-STOP,...;START-STOP,...",
        ),
        (
            lambda: Layout.parse("contiguous:8:0"),
            "Layout.contiguous: group_size must be an integer of at least 1, got 0",
        ),
        (
            lambda: Layout.zigzag(8, 2).shard(torch.zeros(2, 6, 4), 0),
            "dim 1 of (2, 6, 4) is not the layout's 8 tokens",
        ),
        (
            lambda: Layout.zigzag(8, 2).shard(torch.zeros(2, 8, 4), 2),
            "rank must be in 0..1, got 2",
        ),
        (lambda: Layout.zigzag(8, 2).positions(-1), "rank must be in 0..1, got -1"),
        (
            lambda: Layout.zigzag(8, 2).unshard([torch.zeros(1, 4)]),
            "shards have (4,) tokens, layout zigzag:8:2 gives (4, 4)",
        ),
    ],
)
def test_errors(make, message):
    assert message_of(make) == message
