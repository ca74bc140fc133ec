"""Rollouts packed as a trie, against the trie of their prefixes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from customized_ops.ring_attention import AttnMask, Layout
from customized_ops.ring_attention.op.arguments import ArgumentError
from customized_ops.ring_attention.rollouts import PackedRollouts, pack_rollouts

rows = st.lists(st.lists(st.integers(-1, 2), max_size=6), min_size=1, max_size=7)


def path_of(packed: PackedRollouts, node: int) -> list[int]:
    """Tokens from the root to the end of a node."""
    own = packed.tokens[np.cumsum(packed.lengths)[node] - packed.lengths[node] :]
    above = packed.parents[node]
    own = own[: packed.lengths[node]].tolist()
    return own if above < 0 else path_of(packed, int(above)) + own


@given(rows)
@example([[]])
@example([[], [1], [], [1]])
@example([[1, 2, 3], [1, 2], [1, 2, 3], [1, 2, 3, 0], [2]])
@settings(deadline=None, derandomize=True, max_examples=100)
def test_it_is_the_trie(given: list[list[int]]) -> None:
    packed = pack_rollouts([np.array(row, dtype=np.int32) for row in given])
    prefixes = {tuple(row[: n + 1]) for row in given for n in range(len(row))}
    assert len(packed.tokens) == len(prefixes)
    for n, row in enumerate(given):
        path = packed.path(n)
        assert packed.tokens[path].tolist() == row
        assert packed.positions[path].tolist() == list(range(len(row)))
        assert packed.before[path].tolist() == [-1, *path.tolist()][: len(row)]
    through = {p: sum(tuple(row[: len(p)]) == p for row in given) for p in prefixes}
    # Each token of a node by its path from the root.
    seen, at = set(), 0
    for node, length in enumerate(packed.lengths.tolist()):
        path = path_of(packed, node)
        counts = {through[tuple(path[: len(path) - m])] for m in range(length)}
        assert counts == {packed.multiplicities[at]}, "a node is of the same rollouts"
        seen |= {tuple(path[: len(path) - m]) for m in range(length)}
        above = tuple(path[: len(path) - length])
        assert not above or through[above] > packed.multiplicities[at], "or it would be one node"
        at += length
    assert seen == prefixes
    assert packed.mask == AttnMask.prefix_tree(packed.parents, packed.lengths)


def test_apart_they_are_packed_documents() -> None:
    packed = pack_rollouts([[1, 2], [1, 2, 3], [1]], share=False)
    assert packed.tokens.tolist() == [1, 2, 1, 2, 3, 1]
    assert packed.mask == AttnMask.varlen([0, 2, 5, 6], causal=True)
    assert packed.saved_tokens == packed.saved_pairs == 0.0


def test_what_is_saved_is_printed() -> None:
    prompt = list(range(8))
    packed = pack_rollouts([torch.tensor([*prompt, 8 + n, 20]) for n in range(4)], 8)
    assert str(packed) == (
        "4 rollouts as a tree of 5 nodes\n"
        "tokens    16 of 40: 60.0% saved\n"
        "attention 112 pairs of 220: 49.1% saved"
    )


@pytest.mark.parametrize(
    ("given", "prompts", "said"),
    [
        ([], 0, "rollouts must be one or more, got none"),
        ([[1], [1.5]], 0, "rollouts[1] must be a row of integers, got float64 (1,)"),
        ([[[1]]], 0, "rollouts[0] must be a row of integers, got int64 (1, 1)"),
        (5, 0, "rollouts must be a list of rollouts, got 5"),
        ([([1, 2], 1)], 0, "rollouts[0] must be a row of integers on the host, got ([1, 2], 1)"),
        (
            [[1, 2]],
            [[1], [1, 2]],
            "prompts must be an integer, or one for each of 1 rollouts, got [[1], [1, 2]]",
        ),
        ([[1, 2], [3]], [1], "prompts must be an integer, or one for each of 2 rollouts, got [1]"),
        ([[1, 2], [3]], 0.5, "prompts must be an integer, or one for each of 2 rollouts, got 0.5"),
        ([[1, 2], [3]], 2, "prompts[1] must be 0 to 1, the tokens of rollouts[1], got 2"),
        ([[1, 2], [3]], [-1, 0], "prompts[0] must be 0 to 2, the tokens of rollouts[0], got -1"),
    ],
)
def test_errors_name_the_argument(given: Any, prompts: Any, said: str) -> None:
    with pytest.raises(ArgumentError) as error:
        pack_rollouts(given, prompts)
    assert str(error.value) == f"pack_rollouts: {said}"


@pytest.mark.parametrize(
    ("layout", "rank", "said"),
    [
        (Layout.contiguous(6, 2), 0, "layout must be of 4 tokens, got .*, of 6"),
        (2, 0, "layout must be a Layout of 4 tokens, or None, got 2"),
        (Layout.contiguous(4, 2), 2, "rank must be 0 to 1, got 2"),
        (None, "0", "rank must be 0 to 0, got '0'"),
    ],
)
def test_a_part_of_another_layout_is_refused(layout: Any, rank: Any, said: str) -> None:
    packed = pack_rollouts([[1, 2, 3], [1, 2, 4]])
    with pytest.raises(ArgumentError, match="PackedRollouts.part: " + said):
        packed.part(layout, rank)


@pytest.mark.parametrize("rollout", [2, -1, "a"])
def test_a_path_of_no_rollout_is_refused(rollout: Any) -> None:
    with pytest.raises(ArgumentError, match=f"path: rollout must be 0 to 1, got {rollout!r}"):
        pack_rollouts([[1, 2, 3], [1, 2, 4]]).path(rollout)
