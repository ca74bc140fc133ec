"""Random masks, by every constructor; and smaller ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import numpy as np

from ...core.mask import AttnMask
from .sequences import documents, length, small


def window(random: Random) -> tuple[int, int]:
    """A random window, mostly none; each side may be unbounded."""
    if random.random() < 0.6:
        return -1, -1
    return random.choice([-1, 0, random.randint(1, 30)]), random.choice([-1, 0, 3])


def _ranges(random: Random) -> AttnMask:
    """Disjoint query ranges, each with any keys and any of the four types."""
    rows, keys = length(random), length(random)
    cuts = sorted(random.randint(0, rows) for _ in range(random.randint(0, 4)))
    q_ranges = list(zip([0, *cuts], [*cuts, rows], strict=True))
    k_ranges = [sorted(random.choices(range(keys + 1), k=2)) for _ in q_ranges]
    types = [random.randint(0, 3) for _ in q_ranges]
    return AttnMask.from_ranges(q_ranges, k_ranges, types, rows, keys)


def _random_pairs(random: Random) -> AttnMask:
    draw = np.random.default_rng(random.randrange(1 << 30))
    shape = random.randint(1, 24), random.randint(1, 24)
    return AttnMask.from_dense(draw.random(shape) < random.random())


def _blocks(random: Random) -> AttnMask:
    draw = np.random.default_rng(random.randrange(1 << 30))
    bits = draw.random((random.randint(1, 6), random.randint(1, 6))) < 0.5
    return AttnMask.from_block_mask(bits, (random.randint(1, 9), random.randint(1, 9)))


def _varlen(random: Random) -> AttnMask:
    return AttnMask.varlen(
        documents(random),
        causal=random.random() < 0.5,
        window=window(random),
        global_tokens=random.randint(0, 3),
    )


def _united(random: Random) -> AttnMask:
    n = length(random)
    cut = random.randint(0, n)
    left = AttnMask.sliding_window(n, random.randint(0, 9), random.randint(0, 9))
    right = AttnMask.block_causal(n, random.randint(1, 9))
    return left.restrict(k_range=(0, cut)).union(right.restrict(k_range=(cut, n)))


def _prefix_tree(random: Random) -> AttnMask:
    """Nodes in depth-first order, each a root, or below the previous node or an ancestor of it."""
    parents: list[int] = []
    path: list[int] = []
    for node in range(small(random)):
        path = path[: random.randint(0, len(path))]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return AttnMask.prefix_tree(parents, [random.randint(0, 9) for _ in parents])


MASKS: dict[str, Callable[[Random], AttnMask]] = {
    "full": lambda r: AttnMask.full(length(r), length(r)),
    "causal": lambda r: AttnMask.causal(length(r), length(r)),
    "sliding_window": lambda r: AttnMask.sliding_window(length(r), small(r), small(r)),
    "varlen": _varlen,
    "prefix_lm": lambda r: AttnMask.prefix_lm(length(r), small(r)),
    "block_causal": lambda r: AttnMask.block_causal(length(r), small(r)),
    "block_diffusion": lambda r: AttnMask.block_diffusion(small(r) * 3, small(r)),
    "prefix_tree": _prefix_tree,
    "shared_prefix": lambda r: AttnMask.shared_prefix(length(r), [small(r) for _ in range(3)]),
    "streaming": lambda r: AttnMask.streaming(length(r), small(r), small(r)),
    "strided": lambda r: AttnMask.strided(length(r), small(r), small(r)),
    "global_local": lambda r: AttnMask.global_local(length(r), small(r), small(r)),
    "star": lambda r: AttnMask.star(length(r), small(r), small(r)),
    "from_ranges": _ranges,
    "from_dense": _random_pairs,
    "from_block_mask": _blocks,
    "union": _united,
}


def smaller_masks(mask: AttnMask) -> Iterator[AttnMask]:
    """The mask with only the first half of its rows or keys, or without one slice."""
    rows = mask.slices.tolist()
    for q_len, k_len in ((mask.q_len // 2, mask.k_len), (mask.q_len, mask.k_len // 2)):
        if q_len and k_len and (q_len, k_len) != (mask.q_len, mask.k_len):
            inside = mask.restrict((0, q_len), (0, k_len)).slices
            yield AttnMask.from_slices(inside, q_len, k_len)
    if len(rows) > 1:
        for n in range(len(rows)):
            yield AttnMask.from_slices(rows[:n] + rows[n + 1 :], mask.q_len, mask.k_len)
