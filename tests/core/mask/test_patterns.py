"""Every mask constructor against a formula over query i and key j."""

import inspect
import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from customized_ops.ring_attention.core.mask import AttnMask, MaskError
from customized_ops.ring_attention.core.mask.overlap import first_overlap
from customized_ops.ring_attention.core.mask.slices import normalise

FEW = settings(deadline=None, derandomize=True, max_examples=75)
tokens = st.integers(0, 14)
positive = st.integers(1, 16)
window = st.integers(-1, 15)


def ij(q_len, k_len=None):
    return np.indices((q_len, q_len if k_len is None else k_len))


def beyond(window):
    return 10**6 if window == -1 else window


def check(mask, want):
    """The mask is ``want``; no pair twice (the area counts slices), every slice tight."""
    assert (mask.q_len, mask.k_len) == want.shape
    assert (mask.to_dense() == want).all(), f"\n{mask.picture()}\nwanted\n{want.astype(int)}"
    assert mask.area == want.sum()
    assert (normalise(mask.slices) == mask.slices).all()
    assert first_overlap(mask.slices) is None


def test_check_can_fail():
    with pytest.raises(AssertionError):
        check(AttnMask.causal(3), AttnMask.full(3).to_dense())
    twice = AttnMask._disjoint(np.concatenate([AttnMask.full(2).slices] * 2), 2, 2)
    with pytest.raises(AssertionError):
        check(twice, AttnMask.full(2).to_dense())


@given(tokens, tokens)
@example(0, 0)
@example(1, 1)
@FEW
def test_full_and_causal(q_len, k_len):
    i, j = ij(q_len, k_len)
    check(AttnMask.full(q_len, k_len), j >= 0)
    check(AttnMask.full(q_len), ij(q_len)[0] >= 0)
    check(AttnMask.causal(q_len, k_len), j - i <= k_len - q_len)
    check(AttnMask.causal(q_len), ij(q_len)[1] <= ij(q_len)[0])


@given(tokens, window, window)
@example(1, 0, 0)
@example(5, 0, 0)
@example(5, -1, -1)
@FEW
def test_sliding_window(n, left, right):
    i, j = ij(n)
    want = (i - j <= beyond(left)) & (j - i <= beyond(right))
    check(AttnMask.sliding_window(n, left, right), want)


def packed(q_lens, k_lens, causal, sides, global_tokens):
    """Documents as a formula over each token's document and its place in it."""
    q_doc, k_doc = np.repeat(np.arange(len(q_lens)), q_lens), np.repeat(range(len(k_lens)), k_lens)
    i = np.concatenate([np.arange(n) + k - n for n, k in zip(q_lens, k_lens, strict=True)] or [[]])
    j = np.concatenate([np.arange(n) for n in k_lens] or [[]])
    ahead = j[None, :] - i[:, None]
    seen = (-ahead <= beyond(sides[0])) & (ahead <= beyond(sides[1]))
    seen |= (j < global_tokens)[None, :]
    if causal:
        seen &= ahead <= 0
    return seen & (q_doc[:, None] == k_doc[None, :])


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=4),
    st.booleans(),
    st.tuples(window, window),
    st.integers(0, 8),
)
@example([(0, 0), (4, 4), (0, 0)], True, (1, 0), 1)  # empty documents at both ends
@example([(6, 3), (2, 5)], True, (1, 0), 9)  # more global tokens than keys; cross lengths
@example([(0, 3), (3, 0)], False, (0, 0), 2)
@example([(4, 4)], False, (-1, 0), 2)  # global tokens open keys ahead
@example([(6, 6)], True, (0, -1), 0)
@FEW
def test_varlen(lengths, causal, sides, global_tokens):
    q_lens, k_lens = [n for n, _ in lengths], [n for _, n in lengths]
    cu_q, cu_k = np.cumsum([0, *q_lens]), np.cumsum([0, *k_lens])
    options = dict(causal=causal, window=sides, global_tokens=global_tokens)
    want = packed(q_lens, k_lens, causal, sides, global_tokens)
    check(AttnMask.varlen(cu_q, cu_k.tolist(), **options), want)
    want = packed(q_lens, q_lens, causal, sides, global_tokens)
    check(AttnMask.varlen(cu_q.astype(np.int32), **options), want)


def test_global_tokens_that_add_nothing_cost_no_slices():
    assert AttnMask.varlen([0, 4], causal=True, global_tokens=2) == AttnMask.causal(4)
    assert AttnMask.varlen([0, 4], global_tokens=2) == AttnMask.full(4)


@given(tokens, window, st.integers(0, 16), st.integers(1, 5))
@example(6, 0, 0, 1)
@example(6, 0, 6, 1)
@example(6, 1, 7, 1)
@example(1, 0, 1, 1)
@example(7, 1, 1, 9)
@FEW
def test_streaming(n, window, sink, block):
    i, j = ij(n)
    recent = i // block - j // block <= beyond(window)
    want = (j <= i) & (recent | (j // block < sink))
    check(AttnMask.streaming(n, window, sink, block=block), want)


@given(tokens, st.integers(0, 16))
@example(0, 0)
@example(5, 0)
@example(5, 5)
@example(5, 9)
@FEW
def test_prefix_lm(n, prefix):
    i, j = ij(n)
    check(AttnMask.prefix_lm(n, prefix), (j <= i) | (j < prefix))


@given(tokens, positive)
@example(5, 1)
@example(5, 9)
@FEW
def test_block_causal(n, block):
    i, j = ij(n)
    check(AttnMask.block_causal(n, block), j // block <= i // block)
    assert AttnMask.block_causal(n, 1) == AttnMask.causal(n), "one slice, not one per token"


@given(st.lists(st.integers(0, 7), max_size=3), positive)
@example([5], 2)
@example([4, 0, 3], 1)
@example([], 3)
@FEW
def test_block_diffusion(lengths, block):
    n, cu_seqlens = sum(lengths), np.cumsum([0, *lengths])
    document = np.tile(np.repeat(np.arange(len(lengths)), lengths), 2)
    place = np.tile(np.concatenate([np.arange(length) for length in lengths] or [[]]), 2) // block
    i, j = ij(2 * n)
    noisy = (j < n) & (i < n) & (place[i] == place[j])
    clean = (j >= n) & np.where(i < n, place[j] < place[i], place[j] <= place[i])
    want = (noisy | clean) & (document[i] == document[j])
    check(AttnMask.block_diffusion(n, block, cu_seqlens), want)
    if len(lengths) == 1:
        check(AttnMask.block_diffusion(n, block), want)


def test_block_diffusion_of_single_tokens_takes_three_slices():
    assert len(AttnMask.block_diffusion(50, 1).slices) == 3


@given(st.integers(0, 6), st.lists(st.integers(0, 5), max_size=4))
@example(0, [])
@example(0, [3, 1])
@example(3, [])
@example(2, [0, 1, 0])
@FEW
def test_shared_prefix(prefix, branches):
    branch = np.repeat(range(-1, len(branches)), [prefix, *branches])
    i, j = ij(len(branch))
    want = (j <= i) & ((branch[j] == -1) | (branch[j] == branch[i]))
    check(AttnMask.shared_prefix(prefix, branches), want)
    check(AttnMask.shared_prefix(prefix, np.array(branches, dtype=np.int32)), want)


@st.composite
def trees(draw):
    """Parents in depth-first order and lengths, with empty nodes, chains and several roots."""
    parents, path = [], []
    for node in range(draw(st.integers(0, 7))):
        path = path[: draw(st.integers(0, len(path)))]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return parents, [draw(st.integers(0, 3)) for _ in parents]


@given(trees())
@example(([-1, 0, 1], [0, 2, 3]))
@example(([-1, 0, 0, 2, -1, 4], [2, 1, 0, 2, 0, 3]))
@example(([-1, 0, 1, 1, 0, 4], [1, 1, 1, 1, 1, 1]))
@FEW
def test_prefix_tree(tree):
    parents, lengths = tree
    above = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        above[node] |= above[parent] if parent >= 0 else False
    i, j = ij(sum(lengths))
    node = np.repeat(np.arange(len(parents)), lengths)
    check(AttnMask.prefix_tree(parents, lengths), (j <= i) & above[node[i], node[j]])


def test_a_prefix_tree_takes_a_slice_for_each_branch():
    lengths = [2, 0, 3]
    assert AttnMask.prefix_tree([-1, 0, 1], lengths) == AttnMask.causal(5)
    assert AttnMask.prefix_tree([-1, -1, -1], lengths) == AttnMask.varlen([0, 2, 2, 5], causal=True)
    assert len(AttnMask.prefix_tree([-1, 0, 1, 1, 3, 0], [1] * 6).slices) == 5


@given(tokens, st.integers(1, 6), window, st.integers(1, 4))
@example(8, 3, 0, 1)
@example(8, 1, 0, 1)
@example(8, 3, 3, 1)
@example(9, 2, 0, 2)
@example(3, 9, 0, 7)
@FEW
def test_strided(n, stride, window, block):
    i, j = ij(n)
    before = i // block - j // block
    want = (j <= i) & ((before <= beyond(window)) | (before % stride == 0))
    check(AttnMask.strided(n, stride, window, block=block), want)


@given(tokens, window, st.integers(0, 16), st.integers(1, 5))
@example(6, 0, 0, 1)
@example(6, 1, 6, 1)
@example(6, 1, 9, 1)
@example(7, 0, 1, 3)
@FEW
def test_global_local(n, window, global_tokens, block):
    i, j = ij(n)
    near = abs(i // block - j // block) <= beyond(window)
    want = near | (i // block < global_tokens) | (j // block < global_tokens)
    check(AttnMask.global_local(n, window, global_tokens, block=block), want)


@given(tokens, positive, st.integers(0, 16))
@example(7, 1, 0)
@example(7, 9, 2)
@example(7, 2, 7)
@example(7, 2, 9)
@FEW
def test_star(n, block, query):
    i, j = ij(n)
    sees = (i // block == j // block) | (j < block) | (i >= n - query)
    check(AttnMask.star(n, block, query), (j <= i) & sees)


def expanded(rows, block):
    """Block tables as UltraAttn prints them: 0 nothing, 1 all, 2 causal."""
    table = np.array([[int(sign) for sign in row] for row in rows.split()])
    i, j = ij(len(table) * block)
    kind = table[i // block, j // block]
    return (kind == 1) | ((kind == 2) & (j <= i))


@pytest.mark.parametrize("block", [1, 2, 5])
def test_the_tables_that_ultraattn_measures(block):
    star = "2000 1200 1020 1002"
    check(AttnMask.star(4 * block, block), expanded(star, block))
    streaming = "20000000 12000000 11200000 11120000 10112000 10011200 10001120 10000112"
    check(AttnMask.streaming(8 * block, 2, 1, block=block), expanded(streaming, block))
    i, j = np.indices((16, 16))
    group = np.kron(np.eye(4, dtype=int), [[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
    strided = AttnMask.from_block_mask((i // 4 == j // 4) & (abs(i - j) < 3), block)
    check(strided, np.kron(group, np.ones((block, block))) == 1)
    cross = np.eye(16, dtype=int)
    cross[0] = cross[:, 0] = 1
    want = np.kron(cross, np.ones((block, block))) == 1
    check(AttnMask.global_local(16 * block, 0, 1, block=block), want)


# --- other forms ---


def range_rule(kind, q_len, k_len):
    """MagiAttention's types in a rectangle, from its corners."""
    i, j = ij(q_len, k_len)
    upper = j <= i + k_len - q_len  # ends bottom right
    lower = j >= i  # starts top left
    return {
        "full": j >= 0,
        "causal": upper,
        "inv_causal": lower,
        "bi_causal": upper & lower,
    }[kind]


@pytest.mark.parametrize(
    "number, kind", list(enumerate(["full", "causal", "inv_causal", "bi_causal"]))
)
def test_from_ranges_in_every_small_rectangle(number, kind):
    for q_len, k_len, q0, k0 in np.ndindex(6, 6, 3, 3):
        want = np.zeros((q0 + q_len, k0 + k_len), dtype=bool)
        want[q0:, k0:] = range_rule(kind, q_len, k_len)
        q, k = [(q0, q0 + q_len)], [(k0, k0 + k_len)]
        check(AttnMask.from_ranges(q, k, [kind]), want)
        wider = AttnMask.from_ranges(np.array(q), np.array(k), np.array([number]), 9, 10)
        check(wider, np.pad(want, ((0, 9 - len(want)), (0, 10 - want.shape[1]))))


def test_bi_causal_is_the_diagonal_of_a_square_and_nothing_when_tall():
    square = AttnMask.from_ranges([(0, 3)], [(1, 4)], ["bi_causal"]).to_dense()
    assert (square == np.eye(3, 4, k=1, dtype=bool)).all()
    tall = AttnMask.from_ranges([(0, 4)], [(0, 3)], ["bi_causal"])
    assert tall.area == 0 and (tall.q_len, tall.k_len) == (4, 3)


def test_from_ranges_may_meet_in_queries_and_keys():
    mask = AttnMask.from_ranges([(0, 4), (0, 4)], [(0, 2), (2, 4)], ["full", "causal"])
    i, j = ij(4)
    check(mask, (j < 2) | (j <= i))
    corners = AttnMask.from_ranges([(0, 4), (0, 3)], [(0, 4), (1, 4)], [1, 2])  # touch, share none
    check(corners, ij(4)[0] >= 0)
    assert AttnMask.from_ranges([], [], []) == AttnMask.full(0)


@given(st.data(), st.integers(1, 4), st.integers(1, 4))
@FEW
def test_from_block_mask(data, q_block, k_block):
    rows, columns = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 6))
    bits = data.draw(st.integers(0, 2 ** (rows * columns) - 1))
    blocks = np.array([bits >> n & 1 for n in range(rows * columns)], dtype=bool)
    blocks = blocks.reshape(rows, columns)
    q_len, k_len = rows * q_block, columns * k_block
    q_len -= data.draw(st.integers(0, q_block - 1)) if rows else 0
    k_len -= data.draw(st.integers(0, k_block - 1)) if columns else 0
    want = np.kron(blocks, np.ones((q_block, k_block), dtype=bool))
    mask = AttnMask.from_block_mask(blocks, (q_block, k_block))
    check(mask, want)
    short = AttnMask.from_block_mask(blocks, (q_block, k_block), q_len=q_len, k_len=k_len)
    check(short, want[:q_len, :k_len])
    assert (np.lexsort(mask.slices[:, [2, 0]].T) == np.arange(len(mask.slices))).all()


@pytest.mark.parametrize(
    "rows, slices",
    [
        ("111 111", 1),  # repeated rows are one slice
        ("101 101", 2),
        ("110 100", 2),  # runs that differ do not join
        ("110 110 000 110", 2),  # a gap ends a slice
        ("010 111 010", 3),
    ],
)
def test_from_block_mask_joins_equal_runs(rows, slices):
    blocks = np.array([[sign == "1" for sign in row] for row in rows.split()])
    mask = AttnMask.from_block_mask(blocks, 4)
    check(mask, np.kron(blocks, np.ones((4, 4), dtype=bool)))
    assert len(mask.slices) == slices


# --- docstrings and errors ---

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
