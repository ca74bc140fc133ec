"""How long planning takes, and how that grows with ranks and documents.

    python examples/benchmark/parts/planning/plan_speed.py

One million tokens of packed documents, causal, contiguous over the ranks; one row per number of
ranks and documents. ``plan`` is make_plan of a mask not seen before, ``rank`` what one rank adds to
it, ``hit`` make_plan of an equal mask again, on one core: medians of several draws of documents,
with their span. The last table is of one sequence over hosts of 8 ranks, with about 8k tokens a
rank, another number in each draw; ranks may share out heads.

    targets   64 ranks x 256 documents: 5 ms   256 x 4096: 50 ms   hit: 0.1 ms
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[4]))
    sys.path.insert(1, str(Path(__file__).parents[3]))

from benchmark.documents import LENGTHS

from customized_ops.ring_attention.core.cost import CostModel
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import make_plan

TOKENS = 1 << 20
CASES = [(8, 32), (64, 256), (256, 1024), (256, 4096), (1024, 4096)]  # ranks, documents
COLUMNS = ("plan ms", "rank ms", "hit ms")
# Ranks, layouts, whether the mask is causal, and heads of the last table.
OVER_HOSTS = (64, 1024), ("zigzag", "contiguous"), (True, False), ((64, 8), (32, 32))


def packed_documents(count: int, tokens: int = TOKENS, seed: int = 0) -> AttnMask:
    """``count`` causal documents that fill ``tokens``, lengths in the histogram's proportions."""
    draw = np.random.default_rng(seed)
    shortest, longest, weight = np.array(LENGTHS).T
    kind = draw.choice(len(weight), count, p=weight / weight.sum())
    length = draw.integers(shortest[kind], longest[kind] + 1)
    ends = np.round(np.cumsum(length) * (tokens / length.sum())).astype(np.int64)
    return AttnMask.varlen(np.concatenate([[0], ends]), causal=True)


def contiguous(mask: AttnMask, ranks: int) -> Layout:
    """The layout of the first table."""
    return Layout.contiguous(TOKENS, ranks)


# Layouts of the second table: those whose many pieces cost time.
LAYOUTS: dict[str, Callable[[AttnMask, int], Layout]] = {
    "contiguous": contiguous,
    "zigzag": lambda mask, ranks: Layout.zigzag(TOKENS, ranks),
    "zigzag by documents": lambda mask, ranks: Layout.zigzag(
        TOKENS, ranks, [*mask.slices[:, 0].tolist(), TOKENS]
    ),
    "striped by 128": lambda mask, ranks: Layout.striped(TOKENS, ranks, 128),
    "balanced": lambda mask, ranks: Layout.balanced(mask, ranks),
}


class Times(NamedTuple):
    """Seconds of each draw: make_plan, one rank's part of the plan, and make_plan again."""

    made: list[float]
    part: list[float]
    hit: list[float]

    def cells(self) -> list[str]:
        """Medians in milliseconds, with their span, of what was measured."""
        return [
            f"{1e3 * median(each):.2f} ({1e3 * min(each):.2f} to {1e3 * max(each):.2f})"
            for each in self
            if each
        ]


def measure(
    ranks: int,
    documents: int,
    draws: int = 9,
    lay: Callable[[AttnMask, int], Layout] = contiguous,
    first: int = 0,
) -> Times:
    """Times of masks and layouts that are new in each draw, so that nothing is known of them."""
    times = Times([], [], [])
    for seed in range(first, first + draws):
        mask = packed_documents(documents, seed=seed)
        layout, again = lay(mask, ranks), AttnMask(mask.slices.copy(), mask.q_len, mask.k_len)
        clock = [perf_counter()]
        plan = make_plan(mask, layout)
        clock.append(perf_counter())
        plan.rank(ranks // 2)
        clock.append(perf_counter())
        assert make_plan(again, layout) is plan
        clock.append(perf_counter())
        for of_draw, start, stop in zip(times, clock, clock[1:], strict=False):
            of_draw.append(stop - start)
    return times


def measure_over_hosts(
    ranks: int, kind: str, heads: tuple[int, int], *, causal: bool, draws: int = 5
) -> Times:
    """Times of one sequence; nothing is hit."""
    times, costs = Times([], [], []), CostModel.over(f"{ranks // 8}x8")
    for tokens in range(8192 * ranks, 8192 * ranks + draws):
        mask = AttnMask.dense(tokens, causal=causal)
        layout = Layout.parse(f"{kind}:{tokens}:{ranks}")
        clock = [perf_counter()]
        plan = make_plan(mask, layout, heads=heads, team_size=None, costs=costs)
        clock.append(perf_counter())
        plan.rank(ranks // 2)
        plan.exchanges(ranks // 2)
        times.made.append(clock[1] - clock[0])
        times.part.append(perf_counter() - clock[1])
    return times


def main() -> None:
    """Print the tables."""
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()

    def show(*cells: str) -> None:
        print("".join(f"{cell:>26}" for cell in cells))

    show("ranks, documents", *COLUMNS)
    for ranks, documents in CASES:
        show(f"{ranks}, {documents}", *measure(ranks, documents).cells())
    print()
    show("64, 256", "pieces", *COLUMNS[:2])
    for name, lay in LAYOUTS.items():
        pieces = str(len(lay(packed_documents(256), 64).pieces))
        show(name, pieces, *measure(64, 256, lay=lay, first=100).cells()[:2])
    print()
    show("ranks, shards", "mask, heads", *COLUMNS[:2])
    for ranks, kind, causal, heads in product(*OVER_HOSTS):
        name = f"{'causal' if causal else 'full'}, {heads[0]}:{heads[1]}"
        times = measure_over_hosts(ranks, kind, heads, causal=causal)
        show(f"{ranks}, {kind}", name, *times.cells()[:2])


if __name__ == "__main__":
    main()
