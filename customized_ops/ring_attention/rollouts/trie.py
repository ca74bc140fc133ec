"""Builds the trie of sequences, in about the time of sorting them.

In lexicographic order a sequence shares its longest prefix with the one before it. So whatever
follows that prefix is new, and the new parts of all sequences, one after the other, are the trie in
depth-first order, as suffix trees are read off suffix arrays (Kasai et al., CPM 2001).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..core.arrays import Ints
from ..core.mask.intervals import runs


class Trie(NamedTuple):
    """Tokens of a trie, depth-first, and the paths of sequences through it; arrays of these names
    in :class:`.PackedRollouts`, where rollouts are the sequences."""

    tokens: Ints
    before: Ints
    paths: Ints
    bounds: Ints


def trie_of(rows: Sequence[Ints], share: bool = True) -> Trie:
    """The trie of int64 rows; without ``share``, each row gets a root of its own."""
    bounds = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    paths = np.empty(bounds[-1], dtype=np.int64)
    order = _lexicographic(rows) if share else range(len(rows))
    new, before = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    last = path = np.zeros(0, np.int64)
    total = 0
    for n in order:
        row = rows[n]
        common = _common(last, row) if share else 0
        stop = total + len(row) - common
        path = np.concatenate([path[:common], np.arange(total, stop)])
        if stop > total:
            new.append(row[common:])
            before.append(path[common - 1 : -1] if common else np.append(-1, path[:-1]))
        paths[bounds[n] : bounds[n + 1]] = path
        last, total = row, stop
    return Trie(np.concatenate(new), np.concatenate(before), paths, bounds)


def _lexicographic(rows: Sequence[Ints]) -> list[int]:
    """An order in which rows with a common prefix are together, shorter ones first."""
    as_text = [row.astype(">i8").tobytes() for row in rows]  # sorts like the numbers
    return sorted(range(len(rows)), key=as_text.__getitem__)


def _common(one: Ints, other: Ints) -> int:
    """The length of the longest common prefix of two rows."""
    shorter = min(len(one), len(other))
    differ = one[:shorter] != other[:shorter]
    return int(differ.argmax()) if differ.any() else shorter


def nodes_of(trie: Trie, multiplicities: Ints) -> tuple[Ints, Ints]:
    """The nodes of a trie: its longest stretches of tokens that the same sequences go through.

    Args:
        multiplicities: int64[l], how many sequences go through each token.
    Returns:
        int64[nodes] parents, -1 for a root, and int64[nodes] lengths, depth-first.
    """
    count = len(trie.tokens)
    goes_on = trie.before[1:] == np.arange(count - 1)
    goes_on &= multiplicities[1:] == multiplicities[:-1]
    heads, lasts = runs(~goes_on, count)
    lengths = lasts - heads + 1
    node_of = np.repeat(np.arange(len(heads)), lengths)
    above = trie.before[heads]
    return np.where(above < 0, -1, node_of[above]), lengths
