"""What is compiled before a training is all that its documents can need."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flash4_library import Library, install

from customized_ops.ring_attention import AttnMask, Layout
from customized_ops.ring_attention.core.kernels import (
    BackwardOperands,
    ForwardOperands,
    Pairs,
    Scoring,
)
from customized_ops.ring_attention.core.kernels.adapters import flash4
from customized_ops.ring_attention.core.plan import make_plan
from customized_ops.ring_attention.core.plan.heads import head_shares
from customized_ops.ring_attention.warm_up import shares

HEADS, DIM = (4, 2), 8
Kind = tuple[Any, ...]


class Kinds(Library):
    """The stand-in, which only notes what the library would compile a kernel for. (The lengths
    are those at which it takes another one on Hopper, for rows of a group of heads too.)"""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Kind] = set()

    def forward(self, **given: Any) -> tuple[Any, ...]:
        self._note("forward", given)
        q, v = given["q"], given["v"]
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        return out, q.new_empty(*q.shape[:-3], q.shape[-2], q.shape[-3]), None, None, None

    def backward(self, **given: Any) -> tuple[Any, ...]:
        self._note("backward", given)
        return tuple(torch.empty_like(given[name]) for name in "qkv")

    def _note(self, name: str, given: dict[str, Any]) -> None:
        cu, blocks = given.get("cu_seqlens_q"), given.get("mask_mod")
        longest = [
            len(given[side][0]) if cu is None else given[f"max_seqlen_{side}"] for side in "qk"
        ]
        window = [given.get(f"window_size_{side}") is not None for side in ("left", "right")]
        many, single = cu is not None and len(cu) > 257, [n <= 256 for n in longest]
        intervals = None if blocks is None else blocks.__closure__[1].cell_contents
        ratio = given["q"].shape[-2] // given["k"].shape[-2]
        kind = given.get("causal"), *window, cu is None, many, *single, intervals
        self.seen.add((name, ratio, *kind))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Kinds:
    library = Kinds()
    install(monkeypatch, library)
    return library


def operands(rows: int, keys: int, heads: tuple[int, int]) -> BackwardOperands:
    """Without values."""
    shapes = (rows, heads[0]), (keys, heads[1]), (keys, heads[1])
    q, k, v = (torch.empty(1, *shape, DIM, dtype=torch.bfloat16) for shape in shapes)
    return BackwardOperands(q, q, k, v, q, torch.empty(1, heads[0], rows))


def documents(draw: np.random.Generator, tokens: int) -> list[int]:
    """Bounds; of few long ones, or of many that are short."""
    median = np.exp(draw.uniform(np.log(4), np.log(tokens)))
    ends = np.cumsum(np.ceil(draw.lognormal(np.log(median), 1.0, tokens))).astype(int)
    return [0, *ends[ends < tokens].tolist(), tokens]


@pytest.mark.parametrize("draws", [24, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("window", [(-1, -1), (700, 0)], ids=["documents", "windows"])
def test_documents_of_any_lengths_need_no_other_kernel(
    library: Kinds, window: tuple[int, int], draws: int
) -> None:
    scoring, windowed, ranks = Scoring(1.0), window != (-1, -1), 8
    for share in shares(HEADS, ranks, ranks // 2, None):
        given = operands(2048, 2048, share)
        for _ in flash4.warm_up(given, scoring, window=windowed, deterministic=False):
            pass
    made, draw = set(library.seen), np.random.default_rng(0)
    assert len(made) > 36 and {ratio for _, ratio, *_ in made} == {1, 2}
    for n in range(draws):
        tokens, team = int(draw.integers(600, 9000)), (1, 2, 4)[n % 3]
        bounds = documents(draw, tokens)
        mask = AttnMask.varlen(bounds, causal=True, window=window)
        layout = Layout.contiguous(tokens, ranks) if n % 2 else Layout.balanced(mask, ranks)
        plan = make_plan(mask, layout, heads=HEADS, team_size=team)
        mine = plan.rank(ranks // 2)
        held = head_shares(*HEADS, team)[mine.rank % team]
        for stage in mine.stages:
            keys = plan.k_layout.sizes[mine.rank] if stage.kv is None else stage.kv.tokens
            for slices, hull in (
                (stage.own_in_hull, stage.own_hull),
                (stage.remote_in_hull, stage.remote_hull),
            ):
                if len(slices):
                    rows = hull[1] - hull[0]
                    pairs = Pairs(slices, rows, keys)
                    given = operands(rows, keys, (held.q_heads, held.kv_heads))
                    flash4.forward(ForwardOperands(*given[1:4]), pairs, scoring, None)
                    flash4.backward(given, pairs, scoring, None)
        assert library.seen <= made, (n, bounds, library.seen - made)
