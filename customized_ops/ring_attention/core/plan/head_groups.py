"""In how many groups of key heads received keys should arrive.

With one group a rank waits for all keys of a stage, attends them, and only then are their gradients
on the way home. With n groups it waits for the first nth of the bytes and is left with the way home
of the last nth, however few ranks and stages there are; each is a kernel call of its own.

    links     | keys of 1 | of 2 |           gradients of 1 | of 2 |
    kernels   | own keys  | heads 1 | heads 2 |

It pays where links are as slow as kernels, as between hosts. Where little is attended a pass takes
as long as its host, 200 us a call, and then one group is best.
"""

from __future__ import annotations

import numpy as np

from ..mask.slices import areas
from .cost import CostModel, moved_bytes
from .plan_value import PlanValue

COUNTS = (1, 2, 4, 8)
FASTER = 0.97  # of the time with one group: more groups only for less than that
DIM, ITEMSIZE = 128, 2  # of a head, and of an element
MEMORY_BYTES = 3e12  # a second, read and written: what setting groups' results side by side takes


def best_head_groups(plan: PlanValue, costs: CostModel, heads: tuple[int, int]) -> int:
    """The count of groups that is the fastest, by the ranks with the busiest link and with the most
    work; 1 where no other spares 3 % of the time of a forward and a backward pass.

    Args:
        plan: one whose keys move and whose heads are not split between ranks.
        heads: query and key heads.
    """
    counts = [n for n in COUNTS if n <= heads[1]]
    passes = costs.passes(plan, *heads, DIM, DIM, ITEMSIZE)
    link = passes[0].link + passes[1].link
    compute = passes[0].compute + passes[1].compute
    if len(counts) == 1 or (1 - FASTER) * compute.max() > link.max():
        return 1  # nothing to hide
    ranks = {int(np.argmax(link)), int(np.argmax(compute))}
    seconds = [max(_seconds(plan, rank, n, costs, heads) for rank in ranks) for n in counts]
    least = min(seconds)
    if least >= FASTER * seconds[0]:
        return 1
    return next(n for n, each in zip(counts, seconds, strict=True) if each <= 1.01 * least)


def _seconds(
    plan: PlanValue, rank: int, count: int, costs: CostModel, heads: tuple[int, int]
) -> float:
    """Of a forward and a backward pass of a rank whose peers are never late."""
    return sum(
        _pass_seconds(plan, rank, count, costs, heads, backward=backward)
        for backward in (False, True)
    )


def _pass_seconds(
    plan: PlanValue,
    rank: int,
    count: int,
    costs: CostModel,
    heads: tuple[int, int],
    *,
    backward: bool,
) -> float:
    """Kernels run one after the other, each when its rows and keys are here; what travels does so
    one after the other too."""
    mine = plan.rank(rank)
    (h, g), row_bytes = heads, heads[0] * DIM * ITEMSIZE
    rows, rows_home = (3, 2) if backward else (1, 1)  # tensors; gradients of rows are wide
    each = np.ones(plan.group_size, dtype=np.int64)
    rows_link = moved_bytes(mine.q, rank, row_bytes * each) / costs.link_bytes
    link = rows * rows_link
    rows_here = link + costs.step_seconds if link else 0.0
    now, home, calls = 0.0, 0.0, 0
    work: list[tuple[float, float, float]] = []  # keys here, time in kernels, time of going home
    for stage in mine.stages:
        times = 1 if stage.kv is None else count
        pairs = areas(stage.own).sum() + areas(stage.remote).sum()
        kernels = float(costs.attend_seconds(pairs, h, DIM, DIM)[backward])
        if times > 1:
            own, remote = (stop - start for start, stop in (stage.own_hull, stage.remote_hull))
            kernels += 2 * (own + remote) * row_bytes / MEMORY_BYTES
        keys = moved_bytes(stage.kv, rank, 2 * g * DIM * ITEMSIZE * each) / costs.link_bytes
        calls += times * ((len(stage.own) > 0) + (len(stage.remote) > 0))
        for _ in range(times):
            link += keys / times
            here = link + costs.step_seconds if keys else 0.0
            here = max(here, rows_here) if len(stage.remote) else here
            work.append((here, kernels / times, keys / times if backward else 0.0))
    for here, kernels, away in work:
        now = max(now, here) + kernels
        if away:
            link = max(link, now) + away
            home = link + costs.step_seconds
    if rows_link:
        home = max(link, now) + rows_home * rows_link + costs.step_seconds
    return max(now, home, calls * costs.call_seconds)
