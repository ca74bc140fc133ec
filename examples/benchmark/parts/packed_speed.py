"""What a new batch of packed documents costs the host before its first kernel can start.

    python examples/benchmark/parts/packed_speed.py
    python examples/benchmark/parts/packed_speed.py --batches 50 --plot packed_speed.png

Documents are drawn from the lengths of a long-context corpus, anew for each batch, and are causal.
One rank of them makes the mask, the layout, the plan, its own part of it, and the arguments of its
kernel calls. Times are milliseconds on one core: the median and the 99th percentile of the batches.
"Most work" is the largest rank's over the mean, "keys" what all ranks receive over all tokens.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

if __name__ == "__main__":  # runs from a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).parents[3]))
    sys.path.insert(1, str(Path(__file__).parents[2]))

from benchmark.documents import document_bounds

from customized_ops.ring_attention.core.kernels.window.lowering import lower
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import make_plan

# Ranks and tokens: about 110, 360 and 1,100 documents.
CASES = [(2, 1 << 15), (8, 1 << 17), (16, 1 << 18), (64, 1 << 19), (128, 1 << 20), (256, 1 << 21)]
STEPS = "mask", "layout", "plan", "own part", "calls"


class Batch(NamedTuple):
    """Milliseconds of each of STEPS, and how good the plan is."""

    documents: int
    times: tuple[float, ...]
    most_work: float
    keys: float


def measure(ranks: int, tokens: int, seed: int) -> Batch:
    """One batch, as the rank in the middle makes it."""
    bounds = document_bounds(tokens, seed)
    stamps = [perf_counter()]
    mask = AttnMask.varlen(bounds, causal=True)
    stamps.append(perf_counter())
    layout = Layout.balanced(mask, ranks)
    stamps.append(perf_counter())
    plan = make_plan(mask, layout, team_size=None)  # as a call asks for it
    stamps.append(perf_counter())
    mine = plan.rank(ranks // 2)
    stamps.append(perf_counter())
    for stage in mine.stages:
        for slices in (stage.own_in_hull, stage.remote_in_hull):
            for call in lower(slices) if len(slices) else ():
                call.lengths()
    stamps.append(perf_counter())
    times = tuple(1e3 * np.diff(stamps))
    keys = plan.kv_tokens()[:, 1].sum() / tokens
    return Batch(len(bounds) - 1, times, plan.imbalance(32, 8), float(keys))


def draw(path: str, rows: list[tuple[int, float, np.ndarray]]) -> None:
    """Times by ranks and by documents."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True)
    for axis, column, label in zip(axes, (0, 1), ("ranks", "documents"), strict=True):
        for quantile, style in ((0.5, "o-"), (0.99, "o--")):
            times = [np.quantile(row[2], quantile) for row in rows]
            axis.loglog([row[column] for row in rows], times, style, label=f"{quantile:.0%}")
        axis.set_xlabel(label)
    axes[0].set_ylabel("ms for a new batch")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Print the table, and draw it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--plot", help="a PNG or SVG file")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    heads = ["ranks", "documents", *STEPS, "p50", "p99", "most work", "keys"]
    print("".join(f"{head:>10}" for head in heads))
    rows = []
    for ranks, tokens in CASES:
        seeds = tqdm(range(given.batches), desc=f"{ranks} ranks", leave=False, disable=None)
        batches = [measure(ranks, tokens, seed) for seed in seeds]
        times = np.array([batch.times for batch in batches])
        total = times.sum(axis=1)
        documents = float(np.median([batch.documents for batch in batches]))
        rows.append((ranks, documents, total))
        worst = max(batch.most_work for batch in batches)
        keys = np.median([batch.keys for batch in batches])
        shown = [*np.median(times, axis=0), *np.quantile(total, [0.5, 0.99]), worst, keys]
        print(f"{ranks:>10}{documents:>10.0f}" + "".join(f"{x:>10.2f}" for x in shown), flush=True)
    if given.plot:
        draw(given.plot, rows)


if __name__ == "__main__":
    main()
