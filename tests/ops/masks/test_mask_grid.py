"""Every constructor of masks x every kind of layout x 1 to 8 ranks, none left out."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import numpy as np
import pytest
from op_cases import Case, check_dense

from customized_ops.ring_attention import AttnMask, Layout

N = 20
DOCUMENTS = [0, 3, 3, 4, 15, N]

MASKS = {
    "full": AttnMask.full(N),
    "causal": AttnMask.causal(N),
    "dense": AttnMask.dense(N, causal=False, window=(6, 2)),
    "sliding_window": AttnMask.sliding_window(N, 5, 1),
    "varlen": AttnMask.varlen(DOCUMENTS, causal=True, window=(4, 0), global_tokens=2),
    "streaming": AttnMask.streaming(N, 4, 3),
    "prefix_lm": AttnMask.prefix_lm(N, 7),
    "block_causal": AttnMask.block_causal(N, 6),
    "block_diffusion": AttnMask.block_diffusion(N // 2, 3, [0, 3, 10]),
    "prefix_tree": AttnMask.prefix_tree([-1, 0, 1, 1, 0, -1], [4, 3, 5, 1, 3, 4]),
    "shared_prefix": AttnMask.shared_prefix(6, [5, 0, 9]),
    "strided": AttnMask.strided(N, 5, 2),
    "global_local": AttnMask.global_local(N, 2, 3),
    "star": AttnMask.star(N, 5, 4),
    "from_ranges": AttnMask.from_ranges(
        [(0, 8), (0, 8), (5, N), (12, 15)],
        [(0, 5), (14, 18), (5, 13), (0, 3)],
        ["causal", "inv_causal", "bi_causal", "full"],
        N,
        N,
    ),
    "from_block_mask": AttnMask.from_block_mask(
        np.random.default_rng(0).random((5, 5)) < 0.4, 4, N, N
    ),
    "from_dense": AttnMask.from_dense(np.random.default_rng(1).random((N, N)) < 0.1),
    "from_slices": AttnMask.from_slices([(3, 9, 4, 5, -N, N), (9, 20, 0, 20, -9, -2)], N, N),
    "union": AttnMask.causal(N).restrict((0, 8)).union(AttnMask.full(N).restrict((11, N), (3, 9))),
    "shift": AttnMask.causal(12).shift(5, 3, N, N),
    "restrict": AttnMask.full(N).restrict((2, 19), (0, 4)),
}
LAYOUTS: dict[str, Callable[[AttnMask, int], Layout]] = {
    "contiguous": lambda mask, ranks: Layout.contiguous(N, ranks),
    "zigzag": lambda mask, ranks: Layout.zigzag(N, ranks),
    "zigzag of documents": lambda mask, ranks: Layout.zigzag(N, ranks, DOCUMENTS),
    "striped": lambda mask, ranks: Layout.striped(N, ranks, 1 + ranks % 3),
    "balanced": lambda mask, ranks: Layout.balanced(mask, ranks, 1),
    "all on the last": lambda mask, ranks: Layout.from_sizes([0] * (ranks - 1) + [N]),
    "back to front": lambda mask, ranks: Layout.from_ranges(
        [[(n, n + 1) for n in range(N - 1 - r, -1, -ranks)] for r in range(ranks)]
    ),
}


# Ranks that compare every call take a third longer.
pytestmark = pytest.mark.usefixtures("unchecked")


def test_every_constructor_is_here() -> None:
    public = {
        name
        for name, member in inspect.getmembers(AttnMask, callable)
        if not name.startswith("_") and name not in ("to_dense", "picture", "mro")
    }
    assert public == set(MASKS)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "sizes", [(3,), pytest.param((1, 2, 4, 5, 6, 7, 8), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS)
def test_equals_dense_on_1_to_8_ranks(mask: str, layout: str, sizes: tuple[int, ...]) -> None:
    given = MASKS[mask]
    for ranks in sizes:
        spec = LAYOUTS[layout](given, ranks).spec
        check_dense(Case("masked", N, given=given, heads=(4, 2), dims=(4, 3), layout=spec), ranks)
