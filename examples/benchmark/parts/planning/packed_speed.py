"""What a new batch of packed documents costs the host before its first kernel can start.

    python examples/benchmark/parts/planning/packed_speed.py
    python examples/benchmark/parts/planning/packed_speed.py --layout balanced --batches 50
    python examples/benchmark/parts/planning/packed_speed.py --plot packed_speed.png
    python examples/benchmark/parts/planning/packed_speed.py --ranks 1024 --host 8 --heads 32:32
    python examples/benchmark/parts/planning/packed_speed.py --layout balanced chunks --ranks 8

Documents are drawn from the lengths of a long-context corpus, anew for each batch, and are causal.
One rank makes everything that ``PackDocuments`` makes from lengths: the mask, the layout, the plan,
its own part of the plan, and "calls": the arguments of its kernel calls for every library, tables
of indices and, up to 8 ranks, what its peers receive. Times are milliseconds on one core: the
median and the 99th percentile of the batches.
"Most work" is the largest rank's over the mean, in the worst batch. "keys" is how many keys all
ranks receive, over all tokens, where ranks do not share out heads, the median of the batches. The
layout "chunks" is a balanced one that is searched for, not constructed.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

if __name__ == "__main__":  # also runs from a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).parents[4]))
    sys.path.insert(1, str(Path(__file__).parents[3]))

from benchmark.command import heads
from benchmark.documents import document_bounds

from customized_ops.ring_attention.core.cost import H200, CostModel
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import make_plan
from customized_ops.ring_attention.core.run.call_pairs import prepare
from customized_ops.ring_attention.core.topology import Topology
from customized_ops.ring_attention.packed_batches import PACKED_LAYOUTS

# Tokens by ranks; 8 ranks have about 110 documents, 64 have 360 and 256 have 1,100.
TOKENS = {
    2: 1 << 15,
    8: 1 << 17,
    16: 1 << 18,
    64: 1 << 19,
    128: 1 << 20,
    256: 1 << 21,
    1024: 1 << 23,
}
STEPS = "mask", "layout", "plan", "own part", "calls"
CHUNKS = 16  # of a rank in the layout "chunks"
LAYOUTS = {
    **PACKED_LAYOUTS,
    "chunks": lambda mask, ranks, topology: Layout.balanced(
        mask, ranks, mask.q_len // (CHUNKS * ranks), topology=topology
    ),
}


class Batch(NamedTuple):
    """Milliseconds of each of STEPS, and how good the plan is."""

    documents: int
    times: tuple[float, ...]
    most_work: float
    keys: float


def measure(name: str, ranks: int, seed: int, costs: CostModel, heads: tuple[int, int]) -> Batch:
    """One batch with the layout of this name, as the rank in the middle makes it."""
    tokens = TOKENS[ranks]
    bounds = document_bounds(tokens, seed)
    stamps = [perf_counter()]
    mask = AttnMask.varlen(bounds, causal=True)
    stamps.append(perf_counter())
    layout = LAYOUTS[name](mask, ranks, costs.topology)
    stamps.append(perf_counter())
    plan = make_plan(
        mask, layout, heads=heads, team_size=None, costs=costs
    )  # in the form that a call requests
    stamps.append(perf_counter())
    plan.rank(ranks // 2)
    stamps.append(perf_counter())
    prepare(plan, ranks // 2)
    stamps.append(perf_counter())
    times = tuple(1e3 * np.diff(stamps))
    whole = make_plan(mask, layout, heads=heads, team_size=1, costs=costs)
    keys = float(whole.kv_tokens()[:, 1].sum() / tokens)
    return Batch(len(bounds) - 1, times, plan.imbalance(*heads), keys)


class Row(NamedTuple):
    """Batches of one layout and number of ranks; ``total``: the milliseconds of each batch."""

    layout: str
    ranks: int
    documents: float
    total: np.ndarray


def draw(path: str, rows: list[Row]) -> None:
    """Times by ranks and by documents."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True)
    for axis, name in zip(axes, ("ranks", "documents"), strict=True):
        for colour, layout in enumerate(dict.fromkeys(row.layout for row in rows)):
            some = [row for row in rows if row.layout == layout]
            for quantile, style in ((0.5, "o-"), (0.99, "o--")):
                times = [np.quantile(row.total, quantile) for row in some]
                by = [getattr(row, name) for row in some]
                axis.loglog(by, times, style, color=f"C{colour}", label=f"{layout}, {quantile:.0%}")
        axis.set_xlabel(name)
    axes[0].set_ylabel("ms for a new batch")
    axes[0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Print the table, and draw it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=[*PACKED_LAYOUTS])
    parser.add_argument("--ranks", nargs="+", type=int, choices=TOKENS, default=[*TOKENS][:-1])
    parser.add_argument("--heads", type=heads, default="32:8", help="query heads:key heads")
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--host", type=int, metavar="N", help="ranks of a host; all if not given")
    parser.add_argument("--plot", help="a PNG or SVG file")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    head = ["ranks", "documents", *STEPS, "p50", "p99", "most work", "keys"]
    print(f"{'layout':>12}" + "".join(f"{name:>10}" for name in head))
    rows = []
    for layout, ranks in product(given.layout, given.ranks):
        name = f"{layout}, {ranks} ranks"
        seeds = tqdm(range(given.batches), desc=name, leave=False, disable=None)
        costs = H200
        if given.host and ranks > given.host:
            costs = CostModel.over(Topology((given.host,) * (ranks // given.host)))
        batches = [measure(layout, ranks, n, costs, given.heads) for n in seeds]
        times = np.array([batch.times for batch in batches])
        total = times.sum(axis=1)
        documents = float(np.median([batch.documents for batch in batches]))
        rows.append(Row(layout, ranks, documents, total))
        worst = max(batch.most_work for batch in batches)
        keys = np.median([batch.keys for batch in batches])
        shown = [*np.median(times, axis=0), *np.quantile(total, [0.5, 0.99]), worst, keys]
        line = f"{layout:>12}{ranks:>10}{documents:>10.0f}" + "".join(f"{x:>10.2f}" for x in shown)
        print(line, flush=True)
    if given.plot:
        draw(given.plot, rows)


if __name__ == "__main__":
    main()
