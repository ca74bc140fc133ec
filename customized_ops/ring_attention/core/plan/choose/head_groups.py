"""In how many groups of key heads received keys should arrive.

With one group a rank waits for all keys of a stage, attends them, and only then are their gradients
on the way home. With n groups it waits only for the first nth of the bytes, and at the end for the
last nth to go home, however few ranks and stages there are. Each group is a kernel call of its own.

    links     | keys of 1 | of 2 |           gradients of 1 | of 2 |
    kernels   | own keys  | heads 1 | heads 2 |

Groups pay off where links are as slow as kernels. Where little is attended, a pass takes as long as
its host needs, 200 us a call and more for messages, and then one group is best.

This is for ranks of one host. Over several, keys come in more parts anyway, and the passes of a
plan count what these hide (:class:`.Pass`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...mask.slices import K0, K1, Q0, Q1, areas, cut_keys
from ..assign.work import TEAM
from ..cost_model import CostModel, Pass
from ..heads import Sizes
from ..plan_value import PlanValue
from ..planned_work import batches

COUNTS = (1, 2, 4, 8)
FASTER = 0.97  # more groups are used only for less than this fraction of the time with one


def best_head_groups(
    plan: PlanValue, passes: tuple[Pass, Pass], costs: CostModel, sizes: Sizes
) -> int:
    """The fastest number of groups, judged by the ranks with the busiest link and with the most
    work; 1 where no other saves 3 % of the time of a forward and a backward pass.

    Args:
        plan: one whose keys move and whose heads are not split between ranks.
        passes: its times, by ``costs``.
        sizes: those of ``passes``.
    """
    counts = [n for n in COUNTS if n <= sizes.kv_heads]
    link = passes[0].link + passes[1].link
    compute = passes[0].compute + passes[1].compute
    busiest, heaviest = int(link.argmax()), int(compute.argmax())
    if len(counts) == 1 or (1 - FASTER) * compute[heaviest] > link[busiest]:
        return 1  # nothing to hide
    parts = [RankTimes.of(plan, rank, costs, sizes) for rank in {busiest, heaviest}]
    alone = max(part.seconds(1) for part in parts)
    if compute[heaviest] >= FASTER * alone:
        return 1
    seconds = [alone, *(max(part.seconds(n) for part in parts) for n in counts[1:])]
    least = min(seconds)
    if least >= FASTER * alone:
        return 1
    return next(n for n, each in zip(counts, seconds, strict=True) if each <= 1.01 * least)


class RankTimes(NamedTuple):
    """What a rank does if its peers are never late. Kernels run one after the other, each once its
    rows and keys are here; transfers follow one another, too. Keys are counted as if they came in
    one step.

    Attributes:
        own_rows, others_rows: whether these are attended over own keys, and over received ones.
        here, away: seconds in kernels over own and over received keys, forward and backward.
        row_link, key_link: seconds on a link for rows, one tensor of them, and for keys, both ways.
        merge: seconds to place a group's results next to the others'.
        batch: seconds of the host for a batch of messages, in as many groups as the plan has.
    """

    costs: CostModel
    own_rows: tuple[bool, bool]
    others_rows: tuple[bool, bool]
    here: tuple[float, float]
    away: tuple[float, float]
    row_link: float
    key_link: float
    merge: float
    batch: float

    @staticmethod
    def of(plan: PlanValue, rank: int, costs: CostModel, sizes: Sizes) -> RankTimes:
        """What ``rank`` does for a plan."""
        q_heads, kv_heads, head_dim, v_dim, _ = sizes
        row_bytes, key_bytes = sizes.q_bytes(q_heads), sizes.kv_bytes(kv_heads)
        over_own_keys, waiting_rows = _by_holder_of_keys(plan, rank)
        area_here = 0 if plan.gathered else over_own_keys
        areas = [area_here, int(plan.area[rank]) - area_here]
        forward, backward = (
            each.tolist() for each in costs.attend_seconds(areas, q_heads, head_dim, v_dim)
        )
        own_rows, others_rows = plan.kinds_of_calls[:, :, rank].tolist()
        return RankTimes(
            costs,
            own_rows,
            others_rows,
            (forward[0], backward[0]),
            (forward[1], backward[1]),
            int(plan.q_tokens()[rank].max()) * row_bytes / costs.link_bytes,
            int(plan.kv_tokens()[rank].max()) * key_bytes / costs.link_bytes,
            2 * waiting_rows * row_bytes / costs.memory_bytes,
            costs.usual_batch_seconds(plan),
        )

    def seconds(self, count: int) -> float:
        """Time of a forward and a backward pass with ``count`` groups of heads."""
        return self.pass_seconds(count, backward=False) + self.pass_seconds(count, backward=True)

    def pass_seconds(self, count: int, *, backward: bool) -> float:
        """Time of one of the two passes."""
        step = self.costs.step_seconds
        here, away = self.here[backward], self.away[backward]
        if count > 1:
            away += self.merge
        key_link = self.key_link / count
        rows, rows_home = (3, 2) if backward else (1, 1)  # tensors; gradients of rows are wide
        link = rows * self.row_link
        rows_there = link + step if link else 0.0
        arrivals = []
        for _ in range(count):
            link += key_link
            arrived = link + step if key_link else 0.0
            arrivals.append(max(arrived, rows_there) if self.others_rows[1] else arrived)
        now, home = (rows_there if self.others_rows[0] else 0.0) + here, 0.0
        for arrived in arrivals:
            now = max(now, arrived) + away / count
            if backward and key_link:
                link = max(link, now) + key_link
                home = link + step
        if self.row_link:
            home = max(link, now) + rows_home * self.row_link + step
        calls = self.own_rows[0] + self.others_rows[0]
        calls += count * (self.own_rows[1] + self.others_rows[1])
        keys, rows = self.key_link > 0, self.row_link > 0
        sent = batches(keys * count, False, rows)[backward]
        launch = calls * self.costs.call_seconds + sent * self.batch
        return max(now, home, launch)


def _by_holder_of_keys(plan: PlanValue, rank: int) -> tuple[int, int]:
    """For ``rank``, where heads are not split: pairs whose keys it holds itself, and rows of slices
    with keys that it does not hold; a row of several slices counts once for each."""
    slices = plan.work[plan.work[:, TEAM] == rank, :TEAM]
    x, _, parts = cut_keys(slices, plan.k_layout.places(rank)[:, :2])
    held = np.bincount(x, parts[:, K1] - parts[:, K0], minlength=len(slices))
    rows = (slices[:, Q1] - slices[:, Q0])[held < slices[:, K1] - slices[:, K0]]
    return int(areas(parts).sum()), int(rows.sum())
