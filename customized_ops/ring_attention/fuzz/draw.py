"""Random trials: every op, constructor of masks, kind of layout and option has its turn."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import torch

from ..core.layout import Layout
from ..core.mask import AttnMask
from ..core.merge.merge import accumulation_dtype
from .attention_case import Case
from .trial import Trial

MOST_RANKS = 8
HEADS = [(1, 1), (2, 2), (4, 2), (6, 1), (6, 3), (8, 4), (8, 8), (16, 2)]
DTYPES = [torch.float64] * 8 + [torch.float32, torch.bfloat16, torch.float16]
SPLIT_HEADS = ("ring", "varlen", "masked")  # functions that take team_size


def trial(random: Random, engine_ranks: int = 0) -> Trial:
    """The next trial; with ``engine_ranks`` one of ``parallelize`` over so many."""
    ranks = engine_ranks or random.randint(1, MOST_RANKS)
    case = CASES[random.choice(list(CASES))](random)
    changes: dict[str, Any] = {
        "heads": random.choice(HEADS),
        "dims": (random.choice([4, 8, 12]), random.choice([3, 8])),
        "dtype": random.choice(DTYPES),
        "softcap": random.choice([0.0, 0.0, 0.0, 1.5]),
        "alibi": _rarely(random),
        "sink": _rarely(random),
        "dropout": random.choice([0.0, 0.0, 0.0, 0.3]),
        "seed": random.randrange(1000),
    }
    if not case.packed:
        changes["batch"] = random.choice([1, 1, 2, 3])
    if engine_ranks:
        plain = {"alibi": False, "dropout": 0.0, "dtype": torch.float64}  # a layer has no seeds
        case = replace(case, **changes | plain)
        return Trial(case, ranks, random.choice(_policies(case, ranks)))
    case = replace(case, **changes, strided=_rarely(random))
    case = replace(case, options=_options(random, case, ranks))
    if case.cu_seqlens_k is None:  # else a layout of q's tokens says nothing of the keys
        case = replace(case, layout=_layout(random, case.mask(), case.length, ranks))
    if case.op == "masked" and (case.length != case.k_length or _rarely(random)):
        case = replace(case, k_layout=_layout(random, case.mask(), case.k_length, ranks))
    return Trial(case, ranks)


def _policies(case: Case, ranks: int) -> list[str]:
    """Those that can split the case over so many ranks; others refuse it by name."""
    heads = ["ulysses", "tp"] if case.heads[0] >= ranks else []
    batch = ["dp"] if case.batch >= ranks and not case.packed else []
    tokens = ["cp"] if min(case.length, case.k_length) >= ranks else []
    return ["auto", *tokens, *heads, *batch]


def _rarely(random: Random) -> bool:
    return random.random() < 0.2


def _options(random: Random, case: Case, ranks: int) -> tuple[tuple[str, Any], ...]:
    some: dict[str, Any] = {
        "deterministic": True,
        "kernel": "reference",
        "reduce_dtype": accumulation_dtype(case.dtype),
    }
    if case.op in SPLIT_HEADS:
        sizes = [n for n in range(1, ranks + 1) if ranks % n == 0 and n <= case.heads[0]]
        some["team_size"] = random.choice(sizes)
    return tuple((name, value) for name, value in some.items() if _rarely(random))


# ------------------------------------------------------------------------------------------- calls


def _length(random: Random) -> int:
    """Often shorter than some ranks need to have a token each; seldom long."""
    return random.choice([random.randint(1, 12), random.randint(1, 60), random.randint(60, 160)])


def _window(random: Random) -> tuple[int, int]:
    """Mostly none; each side may be without end."""
    if random.random() < 0.6:
        return -1, -1
    return random.choice([-1, 0, random.randint(1, 30)]), random.choice([-1, 0, 3])


def _documents(random: Random) -> tuple[int, ...]:
    """Cumulative lengths: empty documents, single tokens and one long one among them."""
    lengths = [
        random.choice([0, 1, random.randint(1, 9), random.randint(1, 60)])
        for _ in range(random.randint(1, 8))
    ]
    return tuple(np.cumsum([0, *lengths, random.randint(1, 20)]).tolist())


def _dense(op: str) -> Callable[[Random], Case]:
    def draw(random: Random) -> Case:
        causal = random.random() < 0.7
        return Case(op, _length(random), causal=causal, window=_window(random))

    return draw


def _packed(op: str) -> Callable[[Random], Case]:
    def draw(random: Random) -> Case:
        ends = _documents(random)
        others = None
        if op == "varlen" and _rarely(random):
            others = tuple(np.cumsum([0, *(random.randint(0, 30) for _ in ends[1:])]).tolist())
        causal = random.random() < 0.7
        return Case(
            op,
            ends[-1],
            causal=causal,
            window=_window(random),
            cu_seqlens=ends,
            cu_seqlens_k=others,
        )

    return draw


def _streaming(random: Random) -> Case:
    window, sinks = (random.randint(0, 20), -1), random.randint(0, 5)
    return Case("streaming", _length(random), window=window, sink_tokens=sinks)


def _packed_streaming(random: Random) -> Case:
    ends, window, sinks = _documents(random), (random.randint(0, 20), -1), random.randint(0, 5)
    return Case("packed streaming", ends[-1], window=window, cu_seqlens=ends, sink_tokens=sinks)


def _masked(random: Random) -> Case:
    mask = MASKS[random.choice(list(MASKS))](random)
    return Case("masked", mask.q_len, given=mask)


CASES: dict[str, Callable[[Random], Case]] = {
    "ring": _dense("ring"),
    "zigzag": _dense("zigzag"),
    "window": _dense("window"),
    "varlen": _packed("varlen"),
    "packed window": _packed("packed window"),
    "streaming": _streaming,
    "packed streaming": _packed_streaming,
    "masked": _masked,
}

# ------------------------------------------------------------------------------------------- masks


def _ranges(random: Random) -> AttnMask:
    """Disjoint query ranges, each with any keys and any of the four types."""
    rows, keys = _length(random), _length(random)
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
        _documents(random),
        causal=random.random() < 0.5,
        window=_window(random),
        global_tokens=random.randint(0, 3),
    )


def _united(random: Random) -> AttnMask:
    n = _length(random)
    cut = random.randint(0, n)
    left = AttnMask.sliding_window(n, random.randint(0, 9), random.randint(0, 9))
    right = AttnMask.block_causal(n, random.randint(1, 9))
    return left.restrict(k_range=(0, cut)).union(right.restrict(k_range=(cut, n)))


def _prefix_tree(random: Random) -> AttnMask:
    """Nodes in depth-first order, each below the one before it or one above that."""
    parents: list[int] = []
    path: list[int] = []
    for node in range(_small(random)):
        path = path[: random.randint(0, len(path))]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return AttnMask.prefix_tree(parents, [random.randint(0, 9) for _ in parents])


def _small(random: Random) -> int:
    return random.randint(1, 9)


MASKS: dict[str, Callable[[Random], AttnMask]] = {
    "full": lambda r: AttnMask.full(_length(r), _length(r)),
    "causal": lambda r: AttnMask.causal(_length(r), _length(r)),
    "sliding_window": lambda r: AttnMask.sliding_window(_length(r), _small(r), _small(r)),
    "varlen": _varlen,
    "prefix_lm": lambda r: AttnMask.prefix_lm(_length(r), _small(r)),
    "block_causal": lambda r: AttnMask.block_causal(_length(r), _small(r)),
    "block_diffusion": lambda r: AttnMask.block_diffusion(_small(r) * 3, _small(r)),
    "prefix_tree": _prefix_tree,
    "shared_prefix": lambda r: AttnMask.shared_prefix(_length(r), [_small(r) for _ in range(3)]),
    "streaming": lambda r: AttnMask.streaming(_length(r), _small(r), _small(r)),
    "strided": lambda r: AttnMask.strided(_length(r), _small(r), _small(r)),
    "global_local": lambda r: AttnMask.global_local(_length(r), _small(r), _small(r)),
    "star": lambda r: AttnMask.star(_length(r), _small(r), _small(r)),
    "from_ranges": _ranges,
    "from_dense": _random_pairs,
    "from_block_mask": _blocks,
    "union": _united,
}

# ----------------------------------------------------------------------------------------- layouts


def _layout(random: Random, mask: AttnMask, total: int, ranks: int) -> str:
    """The text of a layout."""
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
    "striped": lambda random, mask, total, ranks: f"striped:{total}:{ranks}:{_small(random)}",
    "uneven": _uneven,
    "shuffled": _shuffled,
    "balanced": _balanced,
}
