"""What layouts refuse, word for word."""

import pytest
import torch

from customized_ops.ring_attention.core.layout import Layout, LayoutError
from customized_ops.ring_attention.core.mask import AttnMask

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
            "Layout.balanced: topology must be a Topology or None, such as group_costs(group)"
            ".topology or CostModel.over('4x8').topology, got '2x1'",
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
            lambda: Layout.zigzag(8, 2).shard(torch.zeros(8, 6, 4), 0),
            "dim 1 of (8, 6, 4) is not the layout's 8 tokens; pass dim=0",
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
