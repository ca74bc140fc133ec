"""Plans of packed documents, by construction.

Documents attend only themselves, so the layout determines nearly everything. The holder of a row
computes it where ranks then have about the same work, as in balanced layouts. Where they do not, as
with contiguous shards, rows are given away (:mod:`.document_work`). A document that many ranks
compute burdens the ranks that hold its keys, which send them to each of these ranks. Where that
would take longer than kernels do, teams of ranks share out heads: each rank sends and gets a part
of each key.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ...mask.slices import K0, K1, Q0, Q1, areas
from ..assign.document_work import evened_documents
from ..assign.work import TEAM, owned
from ..plan_value import HOST_RANKS, PlanValue
from ..planned_work import batches
from .plan_request import PlanRequest
from .rates import Rates, is_even

# Kernel calls of a pass in which rows are given away: own rows and those of others, over own keys
# and over received ones. Ranks that hold no keys for the rows that they get have one fewer.
CALLS = 4
# Work is given away, or heads are split, where that leaves no more than this fraction of the time.
WORTH = 0.985
# The host works out passes of new documents that are launched like no others in 2 to 9 ms more, on
# H200s. So a plan whose passes are launched alike may take ALIKE_SECONDS longer, also where calls
# are started as fast as from a tape: that is as much in 20 to 90 layers. Only where passes take up
# to SHORT_SECONDS, as longer ones keep the GPU busy meanwhile.
ALIKE_SECONDS, SHORT_SECONDS, REPLAYED_SECONDS = 100e-6, 2e-3, 20e-6
# How many times the time of evenly loaded kernels a good plan may take. (Of 251 batches over links
# of 2 to 310 GB/s that took more than 1.5 times that time, a search was faster for 18, of which 2
# took less than twice; a search takes ten times as long as making such a plan.)
GOOD = 2.0
# How many team sizes are tried until links and hosts are as fast as kernels; with the first they
# mostly are.
TRIED = 3
# The least fraction that a construction sends of the expected keys: fewer ranks than expected read
# a document where some of them compute much of it.
LEAST_SENT = 0.8


def is_of_documents(request: PlanRequest) -> bool:
    """Whether the mask is several documents in order, each a slice over tokens that no other has,
    with the same layout for queries and keys."""
    slices = request.mask.slices
    first = np.minimum(slices[:, Q0], slices[:, K0])
    last = np.maximum(slices[:, Q1], slices[:, K1])
    apart = len(slices) > 1 and bool((last[:-1] <= first[1:]).all())
    return apart and request.q_layout == request.k_layout


def document_plan(request: PlanRequest, rates: Rates) -> PlanValue:
    """A plan of a mask of documents."""
    size = request.team_size or 1
    home = request.plan_of(owned(request.mask.slices, request.q_layout, size), size)
    plan = home
    if not (is_even(home.area) and rates.is_fast(rates.staged(home, request))):
        plan = _evened(home, request, rates)
    return _launched_alike(rates.arranged(plan, request), home, request, rates)


def _launched_alike(
    plan: PlanValue, home: PlanValue, request: PlanRequest, rates: Rates
) -> PlanValue:
    """``plan``, or, where passes are short and this takes little longer, ``home``: every row is
    computed by its holder, which gathers keys. Those before or after a shard are ranges of few
    lengths. (Not where a rank holds nothing.) Those of a document that is cut in two are so by its
    layout. Passes over other documents are then mostly launched alike where ranks write to one
    another, and the host does not work them out anew."""
    asked = request.stages is not None or request.head_groups not in (None, 1)
    writes = request.costs.one_sided and home.group_size <= HOST_RANKS
    if asked or not writes or rates.seconds(plan) > SHORT_SECONDS:
        return plan
    holders = plan.k_layout.pieces[:, 0]
    shards = len(holders) == len(np.unique(holders)) == plan.group_size
    if plan.own_follow and not shards:  # as it is
        return plan
    alike = home.variant(steps=0, rounded=True) if shards else home.variant(steps=0)
    if not (alike.is_gather if shards else alike.own_follow):
        return plan
    replayed = Rates(replace(request.costs, call_seconds=REPLAYED_SECONDS), rates.sizes)
    extra = (each.seconds(alike) - each.seconds(plan) for each in (rates, replayed))
    return alike if all(seconds <= ALIKE_SECONDS for seconds in extra) else plan


def is_good(plan: PlanValue, rates: Rates) -> bool:
    """Whether a plan takes little more than evenly loaded kernels, started in a few calls."""
    least = rates.kernel_seconds(plan.area.mean() / plan.team_size, CALLS - 1)
    return rates.seconds(plan) <= GOOD * least


def _evened(home: PlanValue, request: PlanRequest, rates: Rates) -> PlanValue:
    """The plan with work given away, in teams as large as links need; or ``home``, where every row
    is computed by its holder, if that is as fast."""
    slices, layout = request.mask.slices, request.q_layout
    # Pairs whose kernels take no longer than they take to start.
    pair = rates.attend_seconds(1)[1]
    if not pair:  # no heads
        return home
    least = (CALLS - 1) * rates.costs.call_seconds / pair
    sizes = [request.team_size] if request.team_size else _team_sizes(home, request, rates)
    best: PlanValue | None = None
    for size in sizes:
        plan = home
        if size != home.team_size:
            plan = request.plan_of(owned(slices, layout, size), size)
        if not is_even(plan.area):
            even = evened_documents(plan.work, slices, layout, size, least)
            plan = plan if even is plan.work else request.plan_of(even, size)
        plan = rates.staged(plan, request)
        if best is None or rates.seconds(plan) < WORTH * rates.seconds(best):
            best = plan
        if rates.kernels_are_busy(plan) and (plan.topology is None or rates.is_fast(plan)):
            break
    assert best is not None, "there is a team size"
    if rates.kernel_seconds(home.area.max() / home.team_size, 1) > rates.seconds(best):
        return best
    home = rates.staged(home, request)
    return best if rates.seconds(best) < WORTH * rates.seconds(home) else home


def _team_sizes(home: PlanValue, request: PlanRequest, rates: Rates) -> list[int]:
    """How many ranks may make a team: the likely fastest number first, or the smallest of those
    that seem as fast.

    Args:
        home: the plan where every row is computed by its holder, and heads are not split.
    """
    q_heads, kv_heads = rates.heads
    sent, received = _keys(home)
    most, least = max(sent, received), min(sent, received)
    sizes = rates.sizes
    key, row, result = sizes.kv_bytes(kv_heads), sizes.q_bytes(q_heads), sizes.result_bytes(q_heads)
    # Forward: keys go out; rows go out, their results come back. Backward: keys go out again, and
    # gradients, twice as wide, come back; rows go out with dout and results, gradients come back.
    back = least if home.topology is None else most  # where keys and gradients take turns
    keys = np.array([key * most, key * (2 * most + back)])
    rows = np.array([row + result, 2 * row + result + 2 * row]) * max(home.q_layout.sizes)
    of = list(rates.team_sizes(home.group_size))
    split = np.array(of)[:, None]
    link = keys / np.minimum(split, max(kv_heads, 1)) + rows * (split - 1) / split
    compute = rates.attend_seconds(float(home.area.mean()))
    # For each team size [n, 1], and then [n, 2] for its forward and backward.
    held = [request.arrangement(size).get("held_keys", math.inf) for size in of]
    room = np.array(held)[:, None] / np.where(split == 1, 2 + home.relayed_part, 2)
    steps = np.maximum(np.ceil(received / room), 1)
    messages = np.hstack(batches(steps, (split == 1) & home.relays, split > 1))
    calls = np.where(split > 1, CALLS, CALLS - 1) + steps - 1
    batch = [rates.costs.usual_batch_seconds(home if size == 1 else None) for size in of]
    launch = calls * rates.costs.call_seconds + messages * np.array(batch)[:, None]
    seconds = np.maximum(np.maximum(compute, launch), link / rates.costs.link_bytes).sum(axis=1)
    fast = int((WORTH * seconds <= seconds.min()).argmax())
    others = [n for n in np.argsort(seconds, kind="stable").tolist() if n != fast]
    return [of[n] for n in (fast, *others)][:TRIED]


def _keys(home: PlanValue) -> tuple[float, float]:
    """About how many keys the busiest rank sends, at least, and how many it receives, where work is
    given away: both the ranks that hold a document and those that take some of it read its keys."""
    slices, work = home.mask.slices, home.work
    document = slices[:, Q0].searchsorted(work[:, Q0], side="right") - 1
    area, mean = areas(slices), home.area.mean()
    lacking = np.maximum(mean - home.area, 0.0)
    taken = lacking.sum() / max(int((lacking > 0).sum()), 1)
    holders = np.bincount(document, minlength=len(slices))
    given = np.maximum(area - holders * mean, 0.0)
    readers = holders - 1 + given / max(taken, 1.0)
    tokens = work[:, Q1] - work[:, Q0]
    sent = np.bincount(work[:, TEAM], tokens * readers[document], minlength=home.group_size)
    keys = slices[:, K1] - slices[:, K0]
    return LEAST_SENT * float(sent.max()), float((keys * (readers > 0)).max())
