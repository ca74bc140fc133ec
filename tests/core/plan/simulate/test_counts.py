"""What is counted for all ranks together is what the ranks' own parts of the plan say."""

from __future__ import annotations

import random

import numpy as np
import pytest
from host_cases import drawn_plan

from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.mask.slices import areas
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.core.plan.exchanges.exchange import Exchange
from customized_ops.ring_attention.core.plan.simulate.counts import KeyStep, Messages, counts


def table(messages: Messages, ranks: int) -> list[list[int]]:
    assert (messages.tokens > 0).all()
    links = messages.holder * ranks + messages.reader
    assert len(np.unique(links)) == len(links)
    found = np.bincount(links, messages.tokens, minlength=ranks**2)
    return found.reshape(ranks, ranks).tolist()


def of_exchanges(exchanges: list[Exchange | None]) -> list[list[int]]:
    found = np.zeros((len(exchanges), len(exchanges)))
    for rank, exchange in enumerate(exchanges):
        for peer, _, tokens in exchange.recv.tolist() if exchange is not None else ():
            found[peer, rank] += tokens * (peer != rank)
    return found.tolist()


def check(plan: Plan) -> None:
    found, ranks = counts(plan), range(plan.group_size)
    rows = of_exchanges([plan.exchanges(rank).q for rank in ranks])
    assert table(found.rows, plan.group_size) == rows
    for n in range(plan.n_stages):
        exchanges = [plan.exchanges(rank).kv[n] for rank in ranks]
        step = found.keys[n]
        if step is None:
            assert exchanges == [None] * plan.group_size
        else:
            ways: KeyStep = KeyStep(*(table(way, plan.group_size) for way in step))
            assert ways.straight == of_exchanges(exchanges)
            assert ways.cross == of_exchanges([e.relay and e.relay.cross for e in exchanges])
            assert ways.spread == of_exchanges([e.relay and e.relay.spread for e in exchanges])
        for rank in ranks:
            stage = plan.rank(rank).stages[n]
            slices, hulls = (stage.own, stage.remote), (stage.own_hull, stage.remote_hull)
            assert found.pairs[n, :, rank].tolist() == [areas(each).sum() for each in slices]
            assert found.hulls[n, :, rank].tolist() == [stop - start for start, stop in hulls]


@pytest.mark.thin(3)
@pytest.mark.parametrize("seed", range(60))
def test_counts_of_drawn_plans(seed: int) -> None:
    check(drawn_plan(random.Random(seed)))


@pytest.mark.parametrize("stages", [0, 1, 3])
@pytest.mark.parametrize("team_size", [1, 2, 4])
def test_counts_of_teams(stages: int, team_size: int) -> None:
    mask, layout = AttnMask.causal(256), Layout.zigzag(256, 8)
    check(make_plan(mask, layout, stages=stages, team_size=team_size, heads=(8, 4)))


def test_counts_of_nothing() -> None:
    check(make_plan(AttnMask.from_slices([], 8, 8), Layout.contiguous(8, 2)))
    check(make_plan(AttnMask.dense(0), Layout.contiguous(0, 2)))
    check(make_plan(AttnMask.dense(8), Layout.contiguous(8, 1)))
