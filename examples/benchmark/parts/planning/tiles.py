"""What a two-dimensional assignment is predicted to do, and so why there is none.

    python examples/benchmark/parts/planning/tiles.py

Ranks in a grid: a rank computes the rows of all ranks of its grid row, over the keys of all ranks
of its grid column (Mesh-Attention, arXiv:2512.20968), so rows and keys both move, and each rank
receives fewer bytes. With zigzag shards of a causal mask all ranks have the same work. Shows the
milliseconds of a forward and of a backward by the cost model, for the plan that ``make_plan``
chooses and for the best grid of each width; hosts of 8 ranks over NCCL, head dim 128, bf16.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[4]))

from customized_ops.ring_attention.core.arrays import Ints, columns
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.mask.intervals import runs
from customized_ops.ring_attention.core.mask.slices import cut_keys, cut_rows
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.core.plan.assign.work import Work, with_team
from customized_ops.ring_attention.core.plan.cost_model import CostModel
from customized_ops.ring_attention.core.plan.heads import Sizes
from customized_ops.ring_attention.core.topology import Topology

HOST = 8
RANKS, HEADS, TOKENS = (64, 256), ((64, 8), (32, 32)), (2048, 8192)  # tokens per rank
BETWEEN = (50e9, 25e9, 12.5e9)  # bytes per second and rank
WIDTHS = (2, 4, 8, 16, 32)  # ranks in a row of the grid


def tiled(mask: AttnMask, layout: Layout, width: int) -> Work:
    """Rank (i, j) of the grid, i * width + j, computes the rows of ranks (i, ...) over the keys of
    ranks (..., j)."""
    holder = layout.pieces[:, 0]
    rows, keys = (_merged(layout, group) for group in (holder // width, holder % width))
    _, of_row, parts = cut_rows(mask.slices, rows[:, 1:])
    x, of_key, parts = cut_keys(parts, keys[:, 1:])
    return with_team(parts, rows[of_row[x], 0] * width + keys[of_key, 0])


def _merged(layout: Layout, group: Ints) -> Ints:
    """int64[n, 3]: group, start and stop of pieces, with adjacent pieces of a group joined."""
    pieces = layout.pieces
    heads, lasts = runs(group[1:] != group[:-1], len(pieces))
    return columns(group[heads], pieces[heads, 1], pieces[lasts, 2])


def milliseconds(plan: Plan, costs: CostModel, heads: tuple[int, int]) -> tuple[float, float]:
    """Milliseconds of the forward and of the backward."""
    forward, backward = costs.passes(plan, *heads, 128, 128, 2)
    return 1e3 * forward.seconds, 1e3 * backward.seconds


def main() -> None:
    print("ranks  heads  tokens  GB/s   kernels        plan, in teams of    tiles, wide      held")
    for ranks, heads, tokens, rate in product(RANKS, HEADS, TOKENS, BETWEEN):
        hosts = Topology((HOST,) * (ranks // HOST))
        costs = replace(CostModel.over(hosts), between_bytes=rate)
        mask, layout = (
            AttnMask.dense(ranks * tokens, causal=True),
            Layout.zigzag(ranks * tokens, ranks),
        )
        plan = make_plan(mask, layout, heads=heads, team_size=None, costs=costs)
        assert plan.request is not None
        arranged = plan.request.arrangement(1)
        grids = {
            width: Plan(mask, layout, layout, tiled(mask, layout, width), 1, **arranged)
            for width in WIDTHS
        }
        tiles = {width: milliseconds(grid, costs, heads) for width, grid in grids.items()}
        best = min(tiles, key=lambda width: sum(tiles[width]))
        kernels = [
            1e3 * float(each.compute.max()) for each in costs.passes(plan, *heads, 128, 128, 2)
        ]
        shown = [kernels, milliseconds(plan, costs, heads), tiles[best]]
        cells = ["{:6.1f} +{:6.1f}".format(*each) for each in shown]
        sizes = Sizes(*heads, 128, 128, 2)
        row_bytes = sizes.q_bytes(heads[0]) + heads[0] * (sizes.v_dim + 1) * sizes.wide_itemsize
        held = (best - 1) * row_bytes / sizes.kv_bytes(heads[1])
        assert np.allclose(grids[best].imbalance(*heads), 1)
        print(
            f"{ranks:5}  {heads[0]:2}:{heads[1]:<2}  {tokens:6}  {rate / 1e9:4.1f}  {cells[0]}  "
            f"{cells[1]}, {plan.team_size:2}  {cells[2]}, {best:2}    {held:6.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
