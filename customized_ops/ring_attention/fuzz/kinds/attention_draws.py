"""Random attention calls with every op and option."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from ...core.merge.merge import accumulation_dtype
from .attention import Case
from .masks import MASKS, window
from .sequences import DTYPES, documents, layout, length, rarely

HEADS = [(1, 1), (2, 2), (4, 2), (6, 1), (6, 3), (8, 4), (8, 8), (16, 2)]
SPLIT_HEADS = ("ring", "varlen", "masked")  # functions that take team_size


def drawn(random: Random, ranks: int) -> Case:
    """A call over this many ranks."""
    case = CASES[random.choice(list(CASES))](random)
    case = replace(
        case,
        heads=random.choice(HEADS),
        dims=(random.choice([4, 8, 12]), random.choice([3, 8])),
        dtype=random.choice(DTYPES),
        softcap=random.choice([0.0, 0.0, 0.0, 1.5]),
        alibi=rarely(random),
        sink=rarely(random),
        of_lse=rarely(random),
        dropout=random.choice([0.0, 0.0, 0.0, 0.3]),
        seed=random.randrange(1000),
        batch=1 if case.packed else random.choice([1, 1, 2, 3]),
        strided=rarely(random),
    )
    case = replace(case, options=_options(random, case, ranks))
    if case.op == "gathered keys":  # its layout follows from the group; with one, fewer options
        return case if ranks == 1 else replace(case, alibi=False, dropout=0.0)
    if case.cu_seqlens_k is None:  # otherwise a layout of q's tokens does not fit the keys
        case = replace(case, layout=layout(random, case.mask(), case.length, ranks))
    if case.op == "masked" and (case.length != case.k_length or rarely(random)):
        case = replace(case, k_layout=layout(random, case.mask(), case.k_length, ranks))
    return case


def _options(random: Random, case: Case, ranks: int) -> tuple[tuple[str, Any], ...]:
    some: dict[str, Any] = {
        "deterministic": True,
        "kernel": "reference",
        "reduce_dtype": accumulation_dtype(case.dtype),
    }
    if case.op in SPLIT_HEADS:
        sizes = [n for n in range(1, ranks + 1) if ranks % n == 0 and n <= case.heads[0]]
        some["team_size"] = random.choice(sizes)
    return tuple((name, value) for name, value in some.items() if rarely(random))


def _dense(op: str) -> Callable[[Random], Case]:
    def draw(random: Random) -> Case:
        causal = random.random() < 0.7
        return Case(op, length(random), causal=causal, window=window(random))

    return draw


def _packed(op: str) -> Callable[[Random], Case]:
    def draw(random: Random) -> Case:
        ends = documents(random)
        others = None
        if op in ("varlen", "gathered keys") and rarely(random):
            others = tuple(np.cumsum([0, *(random.randint(0, 30) for _ in ends[1:])]).tolist())
        causal = random.random() < 0.7
        return Case(
            op,
            ends[-1],
            causal=causal,
            window=window(random),
            cu_seqlens=ends,
            cu_seqlens_k=others,
        )

    return draw


def _streaming(random: Random) -> Case:
    window, sinks = (random.randint(0, 20), -1), random.randint(0, 5)
    return Case("streaming", length(random), window=window, sink_tokens=sinks)


def _packed_streaming(random: Random) -> Case:
    ends, window, sinks = documents(random), (random.randint(0, 20), -1), random.randint(0, 5)
    return Case("packed streaming", ends[-1], window=window, cu_seqlens=ends, sink_tokens=sinks)


def _masked(random: Random) -> Case:
    mask = MASKS[random.choice(list(MASKS))](random)
    return Case("masked", mask.q_len, given=mask)


CASES: dict[str, Callable[[Random], Case]] = {
    "ring": _dense("ring"),
    "zigzag": _dense("zigzag"),
    "window": _dense("window"),
    "varlen": _packed("varlen"),
    "gathered keys": _packed("gathered keys"),
    "packed window": _packed("packed window"),
    "streaming": _streaming,
    "packed streaming": _packed_streaming,
    "masked": _masked,
}
