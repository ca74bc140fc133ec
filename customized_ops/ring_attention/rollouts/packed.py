"""Rollouts as one sequence that holds each shared prefix once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ..core.arrays import Ints
from ..core.layout import Layout
from ..core.mask import AttnMask
from ..op.arguments import ArgumentError, flag_of, is_integer, require
from ..op.tokens.token_rows import token_rows
from .part import RolloutPart
from .trie import nodes_of, trie_of


@dataclass(frozen=True, eq=False)
class PackedRollouts:
    """Rollouts packed as a prefix tree. Its sequence has l tokens, nodes in depth-first order.

    Attributes:
        tokens: int64[l], the ids.
        positions: int64[l], the position of each token in the rollouts that go through it, for
            rotary embeddings.
        parents, lengths: int64[nodes], as :meth:`.AttnMask.prefix_tree` takes them. A node is the
            longest stretch of tokens that the same rollouts go through.
        multiplicities: int64[l], how many rollouts go through each token.
        before: int64[l], the token before each one on its path, at whose row it is predicted; -1
            for the first of a path. The last token of a node may come before several tokens.
        paths: int64[tokens of all rollouts], the tokens that each rollout consists of.
        bounds: int64[rollouts + 1], where each rollout begins in ``paths``.
        prompts: int64[rollouts], how many of each rollout's first tokens are not targets.
    """

    tokens: Ints
    positions: Ints
    parents: Ints
    lengths: Ints
    multiplicities: Ints
    before: Ints
    paths: Ints
    bounds: Ints
    prompts: Ints

    @cached_property
    def mask(self) -> AttnMask:
        """Which pairs attend, for :func:`.wrap_masked_attn_func`."""
        return AttnMask.prefix_tree(self.parents, self.lengths)

    def path(self, rollout: int) -> Ints:
        """int64[n]: which tokens of the sequence a rollout consists of.

        Raises:
            ArgumentError: there is no such rollout.
        """
        count = len(self.bounds) - 1
        fits = is_integer(rollout) and rollout < count
        require(fits, "PackedRollouts.path", "rollout", f"0 to {count - 1}", rollout)
        return self.paths[self.bounds[rollout] : self.bounds[rollout + 1]]

    def part(self, layout: Layout | None = None, rank: int = 0) -> RolloutPart:
        """What a rank holds, and which targets are predicted at its rows, as tensors on the host.

        Args:
            layout: a layout of l tokens, such as ``Layout.balanced(self.mask, ranks)``; None: one
                rank has all.
        Raises:
            ArgumentError: the layout has another number of tokens, or no such rank.
        """
        op, count = "PackedRollouts.part", len(self.tokens)
        if layout is None:
            layout = Layout.contiguous(count, 1)
        fits = isinstance(layout, Layout)
        require(fits, op, "layout", f"a Layout of {count} tokens, or None", layout)
        if layout.total != count:
            raise ArgumentError(
                f"{op}: layout must be of {count} tokens, got {layout}, of {layout.total}"
            )
        fits = is_integer(rank) and rank < layout.group_size
        require(fits, op, "rank", f"0 to {layout.group_size - 1}", rank)
        return _part_of(self, layout, rank)

    @property
    def saved_tokens(self) -> float:
        """The share of all rollouts' tokens that packing them as a tree saves."""
        return 1 - len(self.tokens) / max(len(self.paths), 1)

    @property
    def saved_pairs(self) -> float:
        """The share of attention's work that packing them as a tree saves."""
        return 1 - self.mask.area / max(self._pairs_apart, 1)

    @property
    def _pairs_apart(self) -> int:
        each = np.diff(self.bounds)
        return int((each * (each + 1) // 2).sum())

    def __str__(self) -> str:
        count, apart = len(self.bounds) - 1, len(self.paths)
        nodes = len(self.lengths)
        return (
            f"{count} rollouts as a tree of {nodes} nodes\n"
            f"tokens    {len(self.tokens)} of {apart}: {self.saved_tokens:.1%} saved\n"
            f"attention {self.mask.area} pairs of {self._pairs_apart}: {self.saved_pairs:.1%} saved"
        )


def _part_of(packed: PackedRollouts, layout: Layout, rank: int) -> RolloutPart:
    """What a rank needs of packed rollouts."""
    held = layout.positions(rank)
    local = np.full(layout.total + 1, -1, dtype=np.int64)  # the last entry: no token before
    local[held] = np.arange(len(held))
    counts = np.diff(packed.bounds)
    rollout = np.repeat(np.arange(len(counts)), counts)
    step = np.arange(len(packed.paths)) - packed.bounds[rollout]
    is_target = step >= np.maximum(packed.prompts, 1)[rollout]
    here = is_target & (local[packed.before[packed.paths]] >= 0)
    (place,) = here.nonzero()
    pair, target = _pairs(packed.paths[place], layout.total)
    arrays = {
        "tokens": packed.tokens[held],
        "positions": packed.positions[held],
        "rows": local[packed.before[target]],
        "targets": packed.tokens[target],
        "pair": pair,
        "rollout": rollout[place],
        "place": place,
        "target_counts": np.bincount(rollout[is_target], minlength=len(counts)),
    }
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return RolloutPart(**tensors, rollout_tokens=len(packed.paths), layout=layout, mask=packed.mask)


def _pairs(targets: Ints, total: int) -> tuple[Ints, Ints]:
    """Which pair each target belongs to, [t], and which token each pair predicts, [p].

    Pairs are in the order of their first targets. So where no two targets share a pair, pairs and
    targets correspond one to one, and values of one can be used for the other.
    """
    first = np.empty(total, dtype=np.int64)
    first[targets[::-1]] = np.arange(len(targets))[::-1]  # of equal ones, the first is written last
    begins = first[targets] == np.arange(len(targets))
    return (np.cumsum(begins) - 1)[first[targets]], targets[begins]


def pack_rollouts(
    rollouts: Sequence[Any], prompts: Sequence[int] | int = 0, *, share: bool = True
) -> PackedRollouts:
    """Pack rollouts as a prefix tree; prefixes that they share are found by comparing them.

        a b c d         a b c d e f g h
        a b e f    ->   0 1 2 3 2 3 1 2    positions
        a g h           parents -1 0 1 1 0, lengths 1 1 2 2 2

    Takes about the time of sorting them. Equal rollouts become one path, so whatever a model draws
    at random, such as dropout, is the same for all rollouts that go through a token.

    Args:
        rollouts: the token ids of each rollout, prompt and answer together: a tensor on the host,
            an array or a list of integers; may be empty.
        prompts: for each rollout, or for all, how many of its first tokens are not targets. The
            first token of a rollout never is a target.
        share: if False, rollouts lie end to end as packed documents, as a baseline.
    Raises:
        ArgumentError: there are no rollouts, one is not a row of integers, or ``prompts`` are of
            another number, or out of range.
    """
    rows = token_rows("pack_rollouts", "rollouts", rollouts)
    if not rows:
        raise ArgumentError("pack_rollouts: rollouts must be one or more, got none")
    given = _prompts(prompts, rows)
    trie = trie_of(rows, flag_of("pack_rollouts", "share", share))
    multiplicities = np.bincount(trie.paths, minlength=len(trie.tokens))
    lengths = np.diff(trie.bounds)
    positions = np.empty(len(trie.tokens), dtype=np.int64)
    positions[trie.paths] = np.arange(len(trie.paths)) - np.repeat(trie.bounds[:-1], lengths)
    parents, of_nodes = nodes_of(trie, multiplicities)
    return PackedRollouts(
        positions=positions,
        parents=parents,
        lengths=of_nodes,
        multiplicities=multiplicities,
        prompts=given,
        **trie._asdict(),
    )


def _prompts(prompts: Sequence[int] | int, rows: Sequence[Ints]) -> Ints:
    what = f"an integer, or one for each of {len(rows)} rollouts"
    try:
        each = np.asarray(prompts)
    except (TypeError, ValueError, RuntimeError):  # rows of rows; a tensor on a device
        each = np.array(None)
    fits = each.dtype.kind in "iu" and each.shape in ((), (len(rows),))
    require(fits, "pack_rollouts", "prompts", what, prompts)
    given = np.broadcast_to(each, len(rows)).astype(np.int64)
    for n, row in enumerate(rows):
        if not 0 <= given[n] <= len(row):
            raise ArgumentError(
                f"pack_rollouts: prompts[{n}] must be 0 to {len(row)}, the tokens of rollouts[{n}],"
                f" got {given[n]}"
            )
    return given
