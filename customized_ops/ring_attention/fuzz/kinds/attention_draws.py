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
    op = random.choice(list(CASES))
    case = CASES[op](random, op)
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


def _dense(random: Random, op: str) -> Case:
    causal = random.random() < 0.7
    return Case(op, length(random), causal=causal, window=window(random))


def _packed(random: Random, op: str) -> Case:
    ends = documents(random)
    others = None
    if op in ("varlen", "gathered keys") and rarely(random):
        others = tuple(np.cumsum([0, *(random.randint(0, 30) for _ in ends[1:])]).tolist())
    causal, seen = random.random() < 0.7, window(random)
    return Case(op, ends[-1], causal=causal, window=seen, cu_seqlens=ends, cu_seqlens_k=others)


def _streaming(random: Random, op: str) -> Case:
    window, sinks = (random.randint(0, 20), -1), random.randint(0, 5)
    return Case(op, length(random), window=window, sink_tokens=sinks)


def _packed_streaming(random: Random, op: str) -> Case:
    ends, window, sinks = documents(random), (random.randint(0, 20), -1), random.randint(0, 5)
    return Case(op, ends[-1], window=window, cu_seqlens=ends, sink_tokens=sinks)


def _masked(random: Random, op: str) -> Case:
    mask = MASKS[random.choice(list(MASKS))](random)
    return Case(op, mask.q_len, given=mask)


# Each draws what is particular to its op.
CASES: dict[str, Callable[[Random, str], Case]] = {
    "ring": _dense,
    "zigzag": _dense,
    "window": _dense,
    "varlen": _packed,
    "gathered keys": _packed,
    "packed window": _packed,
    "streaming": _streaming,
    "packed streaming": _packed_streaming,
    "masked": _masked,
}
