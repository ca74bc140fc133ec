"""Every mask constructor against a formula over query i and key j."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from customized_ops.ring_attention.core.mask import AttnMask

from .pattern_cases import FEW, check, ij

tokens = st.integers(0, 14)
positive = st.integers(1, 16)
window = st.integers(-1, 15)


def beyond(window):
    return 10**6 if window == -1 else window


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
