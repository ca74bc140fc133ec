"""The pairs of each kernel call of a rank, worked out once for a plan: in the first step that needs
them, or ahead of it by whoever makes the plan (:func:`prepare`). They travel with the plan."""

from __future__ import annotations

from collections.abc import Hashable

from ..comm.signals import fingerprint
from ..kernels import KERNELS, Pairs
from ..kernels.speeds import needs_window, shape_class
from ..kernels.window import library_calls
from ..plan.plan_value import HOST_RANKS, PlanValue
from ..plan.rank_plan import Range


def stage_pairs(plan: PlanValue, rank: int, stage: int, remote: bool) -> tuple[Range, Pairs]:
    """The rows that a stage's call takes, of remote queries or the rank's own, and its pairs."""
    key = ("pairs", rank, stage, remote)
    if key not in plan.made:
        here = plan.rank(rank).stages[stage]
        rows = start, stop = here.remote_hull if remote else here.own_hull
        slices = here.remote_in_hull if remote else here.own_in_hull
        keys = plan.k_layout.sizes[rank] if here.kv is None else here.kv.tokens
        plan.made[key] = rows, Pairs(slices, stop - start, keys)
    found: tuple[Range, Pairs] = plan.made[key]
    return found


def only_call(plan: PlanValue, rank: int) -> Pairs | None:
    """The pairs of a rank's only call, if its whole pass is one call of all its rows over its own
    keys; else None."""
    key = ("only call", rank)
    if key not in plan.made:
        local, rows, pairs = plan.rank(rank).local, plan.q_layout.sizes[rank], None
        all_rows = local is not None and local.own_hull == (0, rows)
        if all_rows and not (plan.rows_move or plan.keys_move):
            _, pairs = stage_pairs(plan, rank, 0, False)
        plan.made[key] = pairs
    found: Pairs | None = plan.made[key]
    return found


def gathered_moves(plan: PlanValue, rank: int) -> Hashable | None:
    """What moves in a pass that gathers keys and attends them in one call, and which rows attend;
    None for any other pass, and where tokens are scattered, so that there are tables of them."""
    key = ("moves", rank)
    if key not in plan.made:
        plan.made[key] = _moves(plan, rank) if plan.is_gather else None
    found: Hashable | None = plan.made[key]
    return found


def _moves(plan: PlanValue, rank: int) -> Hashable | None:
    (stage,) = plan.rank(rank).stages
    moves: list[Hashable] = [stage.own_hull]
    for each in range(plan.group_size):
        (exchange,) = plan.exchanges(each).kv
        assert exchange is not None
        moves.append(exchange.tokens)
        for tokens in (exchange.sent, exchange.received):
            if any(where.ranges is not None for where in tokens.values()):
                return None
            moves += ((peer, where.start, where.count) for peer, where in tokens.items())
            moves.append(None)
    return tuple(moves) if len(stage.own) else None


def mask_class(plan: PlanValue) -> tuple[str, bool]:
    """The class of the mask, one of SHAPE_CLASSES, and whether a kernel must know windows."""
    key = ("mask class",)
    if key not in plan.made:
        plan.made[key] = shape_class(plan.mask), needs_window(plan.mask)
    found: tuple[str, bool] = plan.made[key]
    return found


def prepare(plan: PlanValue, rank: int) -> None:
    """Work out all that a step of this rank looks up, and the calls for a library that takes any
    windows. Tensors on devices are only made in the step."""
    mine = plan.rank(rank)
    mine.prepare()
    fingerprint(plan)
    mask_class(plan)
    only_call(plan, rank)
    gathered_moves(plan, rank)
    for n, stage in enumerate(mine.stages):
        for remote, slices in ((False, stage.own), (True, stage.remote)):
            if len(slices):
                _, pairs = stage_pairs(plan, rank, n, remote)
                library_calls.prepare(pairs)
                for kernel in KERNELS.values():
                    if kernel_prepare := getattr(kernel, "prepare", None):
                        kernel_prepare(pairs)
    if plan.topology is not None:  # ranks of several hosts send messages
        for exchange in (mine.q, *(stage.kv for stage in mine.stages)):
            _ = exchange.tables(rank, writes=False) if exchange is not None else ()
        return
    for each in range(plan.group_size) if plan.group_size <= HOST_RANKS else [rank]:
        plan.exchanges(each).prepare(None if each == rank else rank)
