"""A plan's mask as an image, in the colours of the ranks that compute its parts. Numpy alone."""

from __future__ import annotations

import numpy as np

from ...arrays import Floats, Ints
from ...mask.intervals import spread, touched
from ...mask.slices import K0, K1, Q0, Q1, Slices, cut_keys
from .. import moves
from ..assign.work import MAX_PARTS, TEAM
from ..moves import RECV, SEND, TOKEN0, TOKEN1
from ..plan_value import PlanValue

WorkByStep = tuple[Slices, Ints, Ints]  # slices, the team of each, the step of each
Image = Floats  # [height, width, 3], between 0 and 1

PIXELS = 1024
# Stripes of parts whose keys are received: period in pixels, and how pale.
PERIOD, PALE = 24, 0.62


def parts_by_step(plan: PlanValue) -> WorkByStep:
    """The plan's work cut by where its keys come from.

    Returns:
        (parts, the team that computes each, the step in which its keys arrive there, from 1; 0
        where the team holds them). If keys are strewn over more parts than MAX_PARTS, the parts are
        the work uncut, as if its team held all keys.
    """
    work, pieces = plan.work, plan.k_layout.pieces
    first, last = touched(work[:, K0], work[:, K1], pieces[:, 1:3])
    if (last - first).sum() > MAX_PARTS:
        return work[:, :TEAM], work[:, TEAM], np.zeros_like(work[:, TEAM])
    found: list[WorkByStep] = []
    all_moves = moves.located(plan.kv_needed, pieces)
    stages, size = max(plan.steps, 1), plan.team_size
    stage_of = moves.ring_stage(all_moves, plan.group_size, stages, size)
    for team in range(plan.group_size // plan.team_size):
        slices = plan.work[plan.work[:, TEAM] == team, :TEAM]
        mine = np.flatnonzero(all_moves[:, RECV] == team)
        mine = mine[np.argsort(all_moves[mine, TOKEN0])]
        _, move, parts = cut_keys(slices, all_moves[mine][:, [TOKEN0, TOKEN1]])
        away = all_moves[mine][move, SEND] // size != team
        step = np.where(away, np.maximum(stage_of[mine][move], 1), 0)
        found.append((parts, np.full(len(parts), team), step))
    parts, teams, steps = (np.concatenate(columns) for columns in zip(*found, strict=True))
    return parts, teams, steps


def paint(plan: PlanValue, parts: WorkByStep, colors: Image, *, striped: bool) -> Image:
    """The mask as an image of at most PIXELS each way, white where nothing is attended.

    Every pixel that a slice touches has its colour, so that thin ones are seen; a short sequence
    gets several pixels a token.

    Args:
        parts: of the plan, see :func:`parts_by_step`.
        colors: [P, 3] between 0 and 1, of each rank; with heads split, a team has its first rank's.
        striped: parts whose keys are received are striped, wider for later steps; else pale.
    """
    slices, team, step = parts
    height, width = (_pixels(n) for n in (plan.mask.q_len, plan.mask.k_len))
    down, across = height / max(plan.mask.q_len, 1), width / max(plan.mask.k_len, 1)
    n, y = spread(*_covered(slices[:, Q0], slices[:, Q1], down))
    q0, q1, k0, k1, lo, hi = slices[n].T
    first = np.maximum(q0, np.floor(y / down).astype(np.int64))
    last = np.minimum(q1, np.ceil((y + 1) / down).astype(np.int64)) - 1
    left, right = np.maximum(k0, first + lo), np.minimum(k1, last + hi + 1)
    m, x = spread(*_covered(left, right, across))
    n, y = n[m], y[m]
    color = colors[team[n] * plan.team_size]
    width_of_stripe = PERIOD * step[n] / (step.max(initial=0) + 1)
    pale = (x + y) % PERIOD < width_of_stripe if striped else step[n] > 0
    color = np.where(pale[:, None], color + (1 - color) * PALE, color)
    image = np.ones((height, width, 3))
    # Of several ranks' parts in a pixel a random one is seen, so that fine parts look mixed.
    order = np.random.default_rng(0).permutation(len(y))
    image[y[order], x[order]] = color[order]
    return image


def _pixels(tokens: int) -> int:
    return tokens * max(PIXELS // tokens, 1) if 0 < tokens <= PIXELS else PIXELS


def _covered(start: Ints, stop: Ints, scale: float) -> tuple[Ints, Ints]:
    """First pixel, and the one after the last, that token ranges touch."""
    first = np.floor(start * scale).astype(np.int64)
    return first, np.ceil(stop * scale).astype(np.int64)
