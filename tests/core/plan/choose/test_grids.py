"""When rows and keys both move: where links between hosts are slower than kernels."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.core.plan.cost_model import CostModel
from customized_ops.ring_attention.core.plan.heads import Sizes
from customized_ops.ring_attention.core.plan.report.hosts import host_figures
from customized_ops.ring_attention.core.topology import Topology

HEADS, SHARD = (32, 32), 2048
SIZES = Sizes(*HEADS, 128, 128, 2)


def causal(hosts: int, assignment: str, between: float, held: float = 4.0) -> Plan:
    """Of one sequence, on hosts of eight."""
    ranks = 8 * hosts
    costs = replace(CostModel.over(Topology((8,) * hosts)), between_bytes=between, held_shards=held)
    mask, layout = AttnMask.causal(ranks * SHARD), Layout.zigzag(ranks * SHARD, ranks)
    given = {"heads": HEADS, "costs": costs, "team_size": None}
    return make_plan(mask, layout, assignment=assignment, **given)


@pytest.mark.parametrize(("hosts", "faster"), [(8, 1.4), (32, 1.6)])
def test_slow_links(hosts: int, faster: float) -> None:
    """Half of all keys cross instead of all, and rows of one other host."""
    plan, owners = (causal(hosts, how, 25e9) for how in ("auto", "owner"))
    assert plan.simulate().seconds * faster < owners.simulate().seconds
    assert plan.rows_of_others == plan.team_size * SHARD and owners.rows_of_others == 0
    figures, before = host_figures(plan), host_figures(owners)
    assert figures.tokens_into_host < 0.55 * before.tokens_into_host
    assert figures.received_rows_at_once == SHARD and before.received_rows_at_once == 0
    shard = SHARD * SIZES.kv_bytes(HEADS[1])
    assert figures.received_bytes_at_once(SIZES) <= 4.05 * shard
    assert f"of others' keys at once, and {SHARD} rows of others (" in plan.report()
    assert "of others' keys at once\n" in owners.report()
    assert "\ngrid      2 blocks: " in plan.report() and "\ngrid" not in owners.report()


def test_grids_that_are_evened_out_are_grids() -> None:
    """Of contiguous shards; a plan that computes as if tokens were elsewhere is none."""
    total = 64 * SHARD
    costs = replace(CostModel.over("8x8"), between_bytes=25e9)
    mask, layout = AttnMask.causal(total), Layout.contiguous(total, 64)
    plan = make_plan(mask, layout, heads=HEADS, team_size=None, costs=costs)
    assert plan.blocks == 2 and "\ngrid      2 blocks" in plan.report()
    assert pickle.loads(pickle.dumps(plan)).blocks == 2
    other = make_plan(mask, layout, assignment="zigzag", costs=costs)
    assert other.rows_of_others > 0 and "\ngrid" not in other.report()


def test_more_memory_takes_more_blocks() -> None:
    few, many = (causal(32, "auto", 12.5e9, held) for held in (4.0, 16.0))
    rows = [host_figures(plan).received_rows_at_once for plan in (few, many)]
    assert rows == [SHARD, 3 * SHARD]  # of two blocks, and of four
    assert many.simulate().seconds < 0.8 * few.simulate().seconds
    shard = SHARD * SIZES.kv_bytes(HEADS[1])
    assert host_figures(many).received_bytes_at_once(SIZES) <= 16.2 * shard


def test_fast_links() -> None:
    plan = causal(8, "auto", 400e9)
    assert plan.rows_of_others == 0


def test_distances_on_a_grid_are_those_inside_a_block() -> None:
    """Each step has keys of the next few hosts of the block, not of all."""
    plan = causal(16, "tiled", 25e9)
    arrivals = plan.arrivals
    assert arrivals is not None and arrivals.senders is not None
    teams, in_block = arrivals.senders.shape
    blocks, size = len(arrivals.slices), plan.team_size
    assert plan.rows_of_others == (plan.blocks - 1) * size * SHARD > 0
    assert (teams, in_block) == (128 // size, 128 // size // plan.blocks)
    assert blocks > 2
    for rank in (3, 100):
        for step, kv in enumerate(plan.exchanges(rank).kv[1:]):
            assert kv is not None
            met = {int(peer) // size for peer in kv.recv[:, 0]} - {rank // size}
            assert len(met) <= -(-in_block // blocks), step


def test_where_there_is_no_grid_work_is_balanced() -> None:
    """Teams that cannot be divided, and layouts of too many pieces."""
    contiguous, striped = Layout.contiguous(700, 7), Layout.striped(1024, 16)
    for layout in (contiguous, striped):
        mask = AttnMask.causal(layout.total)
        plans = [make_plan(mask, layout, assignment=how) for how in ("tiled", "balanced")]
        assert np.array_equal(plans[0].work, plans[1].work)


def test_too_little_memory_for_rows() -> None:
    """With eight query heads for each key head: fewer blocks are asked for by name than would be
    the fastest, and keys have a quarter of the memory."""
    costs = CostModel.over("8x8")
    mask, layout = AttnMask.causal(64 * 8192), Layout.zigzag(64 * 8192, 64)
    plan = make_plan(mask, layout, heads=(64, 8), assignment="tiled", costs=costs)
    assert plan.rows_of_others == 8192 and plan.held_keys == 8192


def test_documents_in_teams_arrive_in_as_few_steps_as_before() -> None:
    """Rows move inside teams, too, which is no grid."""
    total = 16 * 8192
    ends = [0, 4569, 18895, 62019, 67082, 98977, 107864, 124341, 124575, total]
    mask, layout = AttnMask.varlen(ends, causal=True), Layout.zigzag(total, 16)
    given = {"heads": HEADS, "costs": CostModel.over("2x8")}
    plan = make_plan(mask, layout, team_size=4, **given)
    assert plan.rows_move and plan.n_stages <= 3
