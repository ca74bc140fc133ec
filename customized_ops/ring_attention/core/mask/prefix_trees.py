"""Masks of sequences that share prefixes: each token attends its own path from the root."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..arrays import Ints, columns
from .intervals import runs
from .mask_arguments import MaskError, count, integers, not_negative
from .mask_value import MaskValue
from .slices import UNBOUNDED, Slices

if TYPE_CHECKING:
    from typing import Self


class PrefixTrees(MaskValue):
    """Constructors of prefix trees."""

    @classmethod
    def prefix_tree(cls, parents: object, lengths: object) -> Self:
        """A prefix tree (trie): each token sees its own node causally, and its ancestors whole.

            AttnMask.prefix_tree([-1, 0, 1, 1, 0], lengths=[1, 2, 1, 1, 2])
            x . . . . . .
            x x . . . . .
            x x x . . . .
            x x x x . . .
            x x x . x . .
            x . . . . x .
            x . . . . x x

        Use it for rollouts of a policy that share prefixes, each shared prefix once. Several roots
        make trees that do not see one another, like packed documents. Nodes lie in the sequence in
        depth-first order, so a node and all below it are one stretch of tokens, and a node is one
        slice. Nodes without branches between them are one slice together. In another order a node
        could take a slice for each node below it.

        Args:
            parents: for each node, the node that it continues, or -1. Nodes are in depth-first
                order: a parent comes first, and all that is below it directly after it.
            lengths: tokens of each node; may be 0.
        Raises:
            MaskError: not integers, lists of different lengths, a negative length, or a parent that
                is not -1 and not the node before or above it.
        """
        above, tokens = integers("parents", parents), integers("lengths", lengths)
        if len(above) != len(tokens):
            raise MaskError(f"parents has {len(above)} nodes and lengths {len(tokens)}")
        last = last_below(above)
        n = count("the sum of lengths", sum(not_negative("lengths", tokens).tolist()))
        return cls._disjoint(tree_slices(last, tokens), n, n)

    @classmethod
    def shared_prefix(cls, prefix: int, branches: object) -> Self:
        """A shared question: a causal prefix, then answers that see it and themselves only.

            AttnMask.shared_prefix(2, branches=[2, 1])
            x . . . .
            x x . . .
            x x x . .
            x x x x .
            x x . . x

        Several samples of one prompt, or the two answers of a preference pair, without repeating
        the prompt; every branch is causal in itself. A :meth:`prefix_tree` of two levels.

        Args:
            prefix: tokens of the question.
            branches: tokens of each answer, integers; may be empty, as may an answer.
        Raises:
            MaskError: a number is out of range, or no integer.
        """
        prefix = count("prefix", prefix)
        answers = not_negative("branches", integers("branches", branches))
        parents = np.zeros(len(answers) + 1, dtype=np.int64)
        parents[0] = -1
        return cls.prefix_tree(parents, np.insert(answers, 0, prefix))


def last_below(parents: Ints) -> Ints:
    """int64[n]: for each node, in depth-first order, the last node below it, or the node itself.

    Raises:
        MaskError: nodes are in another order; names the first parent that does not fit.
    """
    last = np.arange(len(parents))
    path: list[int] = []
    for node, parent in enumerate(parents.tolist()):
        if not -1 <= parent < node:
            raise MaskError(
                f"parents[{node}] must be -1 or the number of a node before it, got {parent}"
            )
        while path and path[-1] != parent:
            last[path.pop()] = node - 1
        if parent >= 0 and not path:
            raise MaskError(
                f"parents[{node}] = {parent}, but node {node - 1} is not below node {parent}; "
                "nodes must be in depth-first order, all that is below a node directly after it"
            )
        path.append(node)
    last[path] = len(parents) - 1
    return last


def tree_slices(last: Ints, lengths: Ints) -> Slices:
    """Causal slices: the rows from each node to the end of its subtree, with the node's keys.

    Args:
        last: int64[n], see :func:`last_below`. lengths: int64[n], tokens of each node, 0 or more.
    """
    stops = np.cumsum(lengths)
    start, stop, end = (stops - lengths)[lengths > 0], stops[lengths > 0], stops[last][lengths > 0]
    # Where a node's subtree ends with that of the next node, the next one's is all that is below.
    first, final = runs(end[1:] != end[:-1], len(end))
    start, stop, end = start[first], stop[final], end[first]
    zero = np.zeros_like(start)
    return columns(start, end, start, stop, zero - UNBOUNDED, zero)


def is_prefix_tree(slices: Slices) -> bool:
    """Whether normalised slices are those of a prefix tree in which some node has others below it:
    each slice has the rows from a node on, causally, in the order of the nodes."""
    q0, q1, k0, k1, lo, hi = slices.T
    causal = (q0 == k0) & (hi == 0) & (lo == k0 - q1 + 1)
    return bool(causal.all() and (k1[:-1] <= k0[1:]).all() and (q1 > k1).any())
