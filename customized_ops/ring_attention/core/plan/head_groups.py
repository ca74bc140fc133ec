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

from .cost import CostModel, Pass
from .plan_value import PlanValue

COUNTS = (1, 2, 4, 8)
FASTER = 0.97  # of the time with one group: more groups only for less than that
DIM, ITEMSIZE = 128, 2  # of a head, and of an element
MEMORY_BYTES = 3e12  # a second, read and written: what setting groups' results side by side takes


def best_head_groups(
    plan: PlanValue, passes: tuple[Pass, Pass], costs: CostModel, heads: tuple[int, int]
) -> int:
    """The count of groups that is the fastest, by the ranks with the busiest link and with the most
    work; 1 where no other spares 3 % of the time of a forward and a backward pass.

    Args:
        plan: one whose keys move and whose heads are not split between ranks.
        passes: its times, by ``costs``.
        heads: query and key heads.
    """
    counts = [n for n in COUNTS if n <= heads[1]]
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
    one after the other too. Keys are counted as if they came in one step."""
    row_bytes, key_bytes = heads[0] * DIM * ITEMSIZE, 2 * heads[1] * DIM * ITEMSIZE
    row_link = int(plan.q_tokens()[rank].max()) * row_bytes / costs.link_bytes
    key_link = int(plan.kv_tokens()[rank].max()) * key_bytes / costs.link_bytes / count
    (own_here, own_away), (others_here, others_away) = plan.kinds_of_calls[:, :, rank].tolist()
    area = int(plan.area[rank])
    area_here = 0 if plan.gathered else int(plan.area_over_own_keys[rank])
    seconds = costs.attend_seconds([area_here, area - area_here], heads[0], DIM, DIM)[backward]
    here, away = seconds.tolist()
    if count > 1:
        away += 2 * int(plan.rows_over_others_keys[rank]) * row_bytes / MEMORY_BYTES
    rows, rows_home = (3, 2) if backward else (1, 1)  # tensors; gradients of rows are wide
    link = rows * row_link
    rows_there = link + costs.step_seconds if link else 0.0
    arrivals = []
    for _ in range(count):
        link += key_link
        arrived = link + costs.step_seconds if key_link else 0.0
        arrivals.append(max(arrived, rows_there) if others_away else arrived)
    now, home = (rows_there if others_here else 0.0) + here, 0.0
    for arrived in arrivals:
        now = max(now, arrived) + away / count
        if backward and key_link:
            link = max(link, now) + key_link
            home = link + costs.step_seconds
    if row_link:
        home = max(link, now) + rows_home * row_link + costs.step_seconds
    calls = own_here + others_here + count * (own_away + others_away)
    return max(now, home, calls * costs.call_seconds)
