"""Random sequences: their lengths, documents and layouts; and ways to shorten them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import numpy as np
import torch

from ...core.layout import Layout
from ...core.mask import AttnMask

Ends = tuple[int, ...]
DTYPES = [torch.float64] * 8 + [torch.float32, torch.bfloat16, torch.float16]


def layout_of(text: str | None, total: int, ranks: int) -> Layout:
    """The layout of a text, which may name only a kind of layout; None is contiguous."""
    text = text or "contiguous"
    return Layout.parse(text if ":" in text else f"{text}:{total}:{ranks}")


def rarely(random: Random) -> bool:
    """True in one of five draws."""
    return random.random() < 0.2


def small(random: Random) -> int:
    """A number from 1 to 9."""
    return random.randint(1, 9)


def length(random: Random) -> int:
    """A length: often too short for every rank to have a token, seldom long."""
    return random.choice([random.randint(1, 12), random.randint(1, 60), random.randint(60, 160)])


def documents(random: Random) -> Ends:
    """Cumulative lengths: empty documents, single tokens and one long one among them."""
    lengths = [
        random.choice([0, 1, random.randint(1, 9), random.randint(1, 60)])
        for _ in range(random.randint(1, 8))
    ]
    return tuple(np.cumsum([0, *lengths, random.randint(1, 20)]).tolist())


def fewer_tokens(total: int, ends: Ends) -> Iterator[dict[str, Any]]:
    """A smaller ``length``; or, with documents, without one of them or with one of them shortened,
    their ``cu_seqlens`` too."""
    if not ends:
        yield from ({"length": n} for n in shorter(total))
    lengths = [b - a for a, b in pairwise(ends)]
    for n, each in enumerate(lengths):
        for other in ([], *([less] for less in shorter(each))):
            kept = [*lengths[:n], *other, *lengths[n + 1 :]]
            if kept:
                fewer = tuple(accumulate(kept, initial=0))
                yield {"cu_seqlens": fewer, "length": fewer[-1]}


def shorter(total: int) -> Iterator[int]:
    """Half the length, and one token less."""
    yield from (n for n in sorted({total // 2, total - 1}) if 0 < n < total)


# ----------------------------------------------------------------------------------------- layouts


def layout(random: Random, mask: AttnMask, total: int, ranks: int) -> str:
    """The text of a layout; a balanced one is for ``mask``, if that has as many tokens."""
    return LAYOUTS[random.choice(list(LAYOUTS))](random, mask, total, ranks)


def _uneven(random: Random, mask: AttnMask, total: int, ranks: int) -> str:
    cuts = sorted(random.randint(0, total) for _ in range(ranks - 1))
    return Layout.from_sizes(np.diff([0, *cuts, total]).tolist()).spec


def _shuffled(random: Random, mask: AttnMask, total: int, ranks: int) -> str:
    """Ranges on any rank, in any local order; some ranks may hold nothing."""
    cuts = sorted(random.randint(0, total) for _ in range(random.randint(0, 5)))
    pieces = list(zip([0, *cuts], [*cuts, total], strict=True))
    random.shuffle(pieces)
    own: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for piece in pieces:
        own[random.randrange(ranks)].append(piece)
    return Layout.from_ranges(own).spec


def _balanced(random: Random, mask: AttnMask, total: int, ranks: int) -> str:
    square = mask if mask.q_len == mask.k_len == total else AttnMask.causal(total)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # so few tokens cannot be shared out evenly
        return Layout.balanced(square, ranks, random.randint(1, 6)).spec


LAYOUTS: dict[str, Callable[[Random, AttnMask, int, int], str]] = {
    "contiguous": lambda random, mask, total, ranks: f"contiguous:{total}:{ranks}",
    "zigzag": lambda random, mask, total, ranks: f"zigzag:{total}:{ranks}",
    "striped": lambda random, mask, total, ranks: f"striped:{total}:{ranks}:{small(random)}",
    "uneven": _uneven,
    "shuffled": _shuffled,
    "balanced": _balanced,
}
