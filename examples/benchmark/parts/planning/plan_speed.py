"""How long planning takes, and how that grows with ranks and documents.

    python examples/benchmark/parts/planning/plan_speed.py

One million tokens of packed documents, causal, contiguous over the ranks; one row per number of
ranks and documents. ``plan`` is make_plan of a mask not seen before, ``rank`` what one rank adds to
it, ``hit`` make_plan of an equal mask again, each the best of several runs, on one core.

    targets   64 ranks x 256 documents: 5 ms   256 x 4096: 50 ms   hit: 0.1 ms
"""

from __future__ import annotations

import sys
import timeit
from collections.abc import Callable
from math import log
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[4]))
    sys.path.insert(1, str(Path(__file__).parents[3]))

from benchmark.documents import LENGTHS

from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.core.plan import plan as plan_module

TOKENS = 1 << 20
CASES = [(8, 32), (64, 256), (256, 1024), (256, 4096), (1024, 4096)]  # ranks, documents


def packed_documents(count: int, tokens: int = TOKENS, seed: int = 0) -> AttnMask:
    """``count`` causal documents that fill ``tokens``, lengths in the histogram's proportions."""
    draw = np.random.default_rng(seed)
    shortest, longest, weight = np.array(LENGTHS).T
    kind = draw.choice(len(weight), count, p=weight / weight.sum())
    length = draw.integers(shortest[kind], longest[kind] + 1)
    ends = np.round(np.cumsum(length) * (tokens / length.sum())).astype(np.int64)
    return AttnMask.varlen(np.concatenate([[0], ends]), causal=True)


def best_of(runs: int, function: Callable[[], object]) -> float:
    """Seconds of the fastest of ``runs`` calls."""
    return min(timeit.repeat(function, repeat=runs, number=1))


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


def measure(
    ranks: int,
    documents: int,
    runs: int = 5,
    lay: Callable[[AttnMask, int], Layout] = contiguous,
) -> tuple[float, float, float]:
    """(make_plan, plan.rank, make_plan again) in seconds, each the best of ``runs``."""
    mask = packed_documents(documents)
    layout = lay(mask, ranks)

    def fresh() -> Plan:
        plan_module._PLANS.clear()
        return make_plan(mask, layout)

    made = best_of(runs, fresh)
    whole = fresh()
    middle = ranks // 2

    def one_rank() -> None:
        whole._ranks.clear()
        whole.rank(middle)

    part = best_of(runs, one_rank)
    again = AttnMask(mask.slices.copy(), mask.q_len, mask.k_len)
    assert make_plan(again, layout) is whole
    hit = best_of(10 * runs, lambda: make_plan(again, layout))
    return made, part, hit


def exponent(seconds: dict[tuple[int, int], float], axis: int) -> float:
    """How seconds grow with one of (ranks, documents), the other fixed: seconds ~ n ** exponent."""
    small, large = ((256, 1024), (256, 4096)) if axis else ((256, 4096), (1024, 4096))
    return log(seconds[large] / seconds[small]) / log(large[axis] / small[axis])


def main() -> None:
    print(f"{'ranks':>6} {'documents':>10} {'plan ms':>9} {'rank ms':>9} {'hit ms':>9}")
    plans, parts = {}, {}
    for case in CASES:
        made, part, hit = measure(*case)
        plans[case], parts[case] = made, part
        times = " ".join(f"{1e3 * t:>9.3f}" for t in (made, part, hit))
        print(f"{case[0]:>6} {case[1]:>10} {times}")
    for name, seconds in (("plan", plans), ("rank", parts)):
        by_ranks, by_documents = (exponent(seconds, axis) for axis in (0, 1))
        print(f"{name} grows as ranks ** {by_ranks:.2f} and documents ** {by_documents:.2f}")
    print(f"\n{'64 ranks, 256 documents':<24} {'pieces':>9} {'plan ms':>9} {'rank ms':>9}")
    for name, lay in LAYOUTS.items():
        made, part, _ = measure(64, 256, lay=lay)
        pieces = len(lay(packed_documents(256), 64).pieces)
        print(f"{name:<24} {pieces:>9} {1e3 * made:>9.3f} {1e3 * part:>9.3f}")


if __name__ == "__main__":
    main()
