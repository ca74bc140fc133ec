"""Constructors of masks: their pictures, and what they refuse."""

import inspect
import re

import numpy as np
import pytest

from customized_ops.ring_attention.core.mask import AttnMask, MaskError

PICTURED = ("union", "shift", "restrict", "picture")
CONSTRUCTORS = sorted(
    name
    for base in AttnMask.__mro__
    for name, member in vars(base).items()
    if isinstance(member, (staticmethod, classmethod)) and not name.startswith("_")
)


def drawn(mask):
    return [" ".join("x" if seen else "." for seen in row) for row in mask.to_dense()]


@pytest.mark.parametrize("name", [*CONSTRUCTORS, *PICTURED])
def test_docstring_pictures(name):
    """A line of code ``AttnMask.…``, and below it the rows that it draws."""
    doc = inspect.getdoc(getattr(AttnMask, name))
    assert "\nArgs:\n" in doc
    assert "Raises:\n    MaskError:" in doc
    pictures = re.findall(r"^ +(AttnMask\..*)\n((?: +[x.+](?: [x.+])*\n)+)", doc, re.MULTILINE)
    assert pictures and any(f".{name}(" in code for code, _ in pictures)
    for code, rows in pictures:
        shown = eval(code, {"AttnMask": AttnMask, "np": np})
        want = [row.strip() for row in rows.splitlines()]
        assert (shown.splitlines() if isinstance(shown, str) else drawn(shown)) == want, code


BAD = [
    ("full(-1)", "q_len must be at least 0, got -1"),
    ("full(2, 1.0)", "k_len must be an integer, got 1.0"),
    ("full(1 << 40)", "q_len must be below 2**40, got 1099511627776"),
    ("causal(True)", "q_len must be an integer, got True"),
    ("causal('4')", "q_len must be an integer, got '4'"),
    ("sliding_window(4, -2, 0)", "left must be at least -1, got -2"),
    ("sliding_window(4, 0, 1.5)", "right must be an integer, got 1.5"),
    ("sliding_window(None, 0, 0)", "n must be an integer, got None"),
    ("dense(4, window=3)", "window must be (left, right), -1 for no bound, got 3"),
    ("dense(4, window=(1, 2, 3))", "window must be (left, right), -1 for no bound, got (1, 2, 3)"),
    ("dense(4, window=(1, -2))", "window[1] must be at least -1, got -2"),
    ("dense(4, window=(0.5, 0))", "window[0] must be an integer, got 0.5"),
    ("dense(4, causal='no')", "causal must be True or False, got 'no'"),
    ("dense(4, causal=2)", "causal must be True or False, got 2"),
    ("varlen([])", "cu_seqlens_q must be cumulative lengths, the first of them 0, got none"),
    ("varlen([1, 2])", "cu_seqlens_q must start at 0, got cu_seqlens_q[0] = 1"),
    ("varlen([0, 3, 2])", "cu_seqlens_q[2] = 2 is below cu_seqlens_q[1] = 3; cumulative lengths"),
    (
        "varlen([*range(201), 7, *range(201, 370)])",
        "cu_seqlens_q[201] = 7 is below cu_seqlens_q[200] = 200; cumulative lengths never fall",
    ),
    ("varlen(np.array([0, 2**62, -(2**62) - 1]))", "cu_seqlens_q[2] = -46116860184273879"),
    ("varlen([0, 2], [0, 2, 1])", "cu_seqlens_k[2] = 1 is below cu_seqlens_k[1] = 2"),
    ("varlen([0, 4, 1 << 40])", "cu_seqlens_q[2] must be below 2**40, got 1099511627776"),
    ("varlen([0, 2.0])", "cu_seqlens_q[1] must be an integer of 64 bits, got 2.0"),
    ("varlen([False, 2])", "cu_seqlens_q[0] must be an integer of 64 bits, got False"),
    ("varlen([[0, 2]])", "cu_seqlens_q[0] must be an integer of 64 bits, got [0, 2]"),
    ("varlen([0, [2]])", "cu_seqlens_q[1] must be an integer of 64 bits, got [2]"),
    ("varlen(4)", "cu_seqlens_q must be a sequence of integers, got 4"),
    ("varlen([0, 2], [0, 1, 2])", "cu_seqlens_q has 1 documents and cu_seqlens_k 2"),
    ("varlen([0, 2], global_tokens=-1)", "global_tokens must be at least 0, got -1"),
    ("varlen([0, 2], causal=None)", "causal must be True or False, got None"),
    ("varlen(np.arange(99) / 2)", "a sequence of integers, got float64 of shape (99,)"),
    ("streaming(-1, 1, 1)", "n must be at least 0, got -1"),
    ("streaming(4, -2, 1)", "window must be at least -1, got -2"),
    ("streaming(4, 1, -1)", "sink must be at least 0, got -1"),
    ("streaming(4, 1, 1, block=0)", "block must be at least 1, got 0"),
    ("streaming(4, 1., 1)", "window must be an integer, got 1.0"),
    ("prefix_lm(-1, 1)", "n must be at least 0, got -1"),
    ("prefix_lm(4, -1)", "prefix must be at least 0, got -1"),
    ("block_causal(-1, 1)", "n must be at least 0, got -1"),
    ("block_causal(4, 0)", "block must be at least 1, got 0"),
    ("block_diffusion(-1, 1)", "n must be at least 0, got -1"),
    ("block_diffusion(4, 0)", "block must be at least 1, got 0"),
    ("block_diffusion(4, 2, [0, 3])", "cu_seqlens must end at n, 4, got 3"),
    ("block_diffusion(4, 2, [1, 4])", "cu_seqlens must start at 0, got cu_seqlens[0] = 1"),
    ("prefix_tree([-1], [1, 2])", "parents has 1 nodes and lengths 2"),
    ("prefix_tree([-1, -1], [1, -2])", "lengths[1] must be at least 0, got -2"),
    ("prefix_tree([-1, -1], [1 << 39] * 2)", "the sum of lengths must be below 2**40, got 10995"),
    ("prefix_tree([0], [1])", "parents[0] must be -1 or the number of a node before it, got 0"),
    ("prefix_tree([-1, -2], [1, 1])", "parents[1] must be -1 or the number of a node before it,"),
    (
        "prefix_tree([-1, 0, 0, 1], [1] * 4)",
        "parents[3] = 1, but node 2 is not below node 1",
    ),
    ("prefix_tree([-1, 0.5], [1] * 2)", "parents[1] must be an integer of 64 bits, got 0.5"),
    ("shared_prefix(-1, [1])", "prefix must be at least 0, got -1"),
    ("shared_prefix(1, [1, -2])", "branches[1] must be at least 0, got -2"),
    ("shared_prefix(1, [1.5])", "branches[0] must be an integer of 64 bits, got 1.5"),
    ("shared_prefix(1, 3)", "branches must be a sequence of integers, got 3"),
    ("strided(-1, 1, 1)", "n must be at least 0, got -1"),
    ("strided(4, 0, 1)", "stride must be at least 1, got 0"),
    ("strided(4, 1, -2)", "window must be at least -1, got -2"),
    ("strided(4, 1, 1, block=0)", "block must be at least 1, got 0"),
    ("global_local(-1, 1, 1)", "n must be at least 0, got -1"),
    ("global_local(4, -2, 1)", "window must be at least -1, got -2"),
    ("global_local(4, 1, -1)", "global_tokens must be at least 0, got -1"),
    ("global_local(4, 1, 1, block=0)", "block must be at least 1, got 0"),
    ("star(-1, 1)", "n must be at least 0, got -1"),
    ("star(4, 0)", "block must be at least 1, got 0"),
    ("star(4, 1, -1)", "query must be at least 0, got -1"),
    ("from_slices([(0, 1, 0, 1)], 2, 2)", "slices[0] must be 6 integers of 64 bits, got (0, 1,"),
    ("from_slices([(0, 1, 0, 1, 0, .5)], 2, 2)", "slices[0] must be 6 integers of 64 bits"),
    ("from_slices([], -1, 2)", "q_len must be at least 0, got -1"),
    ("from_slices([], 2, None)", "k_len must be an integer, got None"),
    (
        "from_ranges([(0, 2)], [(0, 2)], ['diag'])",
        "types[0] = 'diag' is not known; known: 'full' (0",
    ),
    (
        "from_ranges([(0, 2)], [(0, 2)], [4])",
        "types[0] = 4 is not known; known: 'full' (0), 'causal'",
    ),
    ("from_ranges([(0, 2)], [(0, 2)], [1.0])", "types[0] = 1.0 is not known"),
    ("from_ranges([(0, 2)], [(0, 2)], 'full')", "types must be a list with a type for each range"),
    ("from_ranges([(0, 2)], [(0, 2)], [])", "must be equally many, got 1, 1 and 0"),
    ("from_ranges([(0, 2)], [(0, 2), (3, 1)], [0])", "k_ranges[1] must be (start, stop) with 0 <="),
    ("from_ranges([(-1, 2)], [(0, 2)], [0])", "q_ranges[0] must be (start, stop) with 0 <= start"),
    ("from_ranges([0, 2], [(0, 2)], [0])", "q_ranges[0] must be 2 integers of 64 bits, got 0"),
    (
        "from_ranges([(0, 2)], [(0, 2)], [0], 1)",
        "with 0 <= start <= stop <= 1, got (0, 2)",
    ),
    (
        "from_ranges([(0, 2)] * 2, [(0, 2)] * 2, [0, 1])",
        "range 0 (full, q (0, 2) x k (0, 2)) and range 1 (causal, q (0, 2) x k (0, 2)) cover",
    ),
    (  # what remains of a causal range with fewer keys than queries is less than was given
        "from_ranges([(6, 9), (2, 6), (3, 4)], [(0, 3), (0, 3), (0, 1)], [0, 'causal', 'full'])",
        "range 1 (causal, q (2, 6) x k (0, 3)) and range 2 (full, q (3, 4) x k (0, 1)) cover the",
    ),
    ("from_ranges([(0, 1 << 40)], [(0, 2)], [0])", "q_len must be below 2**40, got 1099511627776"),
    (
        "from_block_mask([[1, 0]], 2)",
        "block_mask must be bool[block rows, block columns], got int64",
    ),
    ("from_block_mask([True], 2)", "got bool of shape (1,)"),
    ("from_block_mask([[True], [True, False]], 2)", "block_mask must be a matrix, got [[True]"),
    ("from_block_mask([[True]], 0)", "block must be at least 1, got 0"),
    ("from_block_mask([[True]], (2, 2, 2))", "block must be an integer or two, got (2, 2, 2)"),
    ("from_block_mask([[True]], 2.0)", "block must be an integer, got 2.0"),
    (
        "from_block_mask([[True]], 2, q_len=3)",
        "q_len = 3 takes 2 blocks of 2, but block_mask has 1",
    ),
    ("from_dense([[1, 0]])", "dense must be bool[queries, keys], got int64 of shape (1, 2)"),
    ("from_dense([True])", "dense must be bool[queries, keys], got bool of shape (1,)"),
    (
        "from_block_mask([[True]], 2, k_len=0)",
        "k_len = 0 takes 0 blocks of 2, but block_mask has 1",
    ),
]


@pytest.mark.parametrize("call, message", BAD)
def test_errors_name_the_argument(call, message):
    with pytest.raises(MaskError) as info:
        eval(f"AttnMask.{call}", {"AttnMask": AttnMask, "np": np})
    assert message in str(info.value)
    assert len(str(info.value)) < 300


def test_every_constructor_has_a_bad_call():
    assert {call.split("(")[0] for call, _ in BAD} == set(CONSTRUCTORS)


def test_numpy_integers_and_no_bound_as_a_huge_window():
    eight, two, most = np.int32(8), np.int64(2), 2**63 - 1
    assert AttnMask.causal(eight) == AttnMask.causal(8)
    assert AttnMask.streaming(eight, two, np.uint8(1)) == AttnMask.streaming(8, 2, 1)
    assert AttnMask.dense(8, window=(np.int64(-1), two)) == AttnMask.dense(8, window=(-1, 2))
    assert type(AttnMask.full(eight).q_len) is int
    assert AttnMask.sliding_window(8, most, most) == AttnMask.full(8)
    assert AttnMask.from_slices([(0, 8, 0, 8, -most, most)], 8, 8) == AttnMask.full(8)
