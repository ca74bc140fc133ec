"""What moves in passes that gather keys and attend them in one call."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

from customized_ops.ring_attention.core.comm.signals import fingerprint
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import make_plan
from customized_ops.ring_attention.core.plan import plan as plan_module
from customized_ops.ring_attention.core.plan.cost_model import CostModel
from customized_ops.ring_attention.core.run.call_pairs import gathered_moves, prepare

TOKENS, HEADS = 192, (4, 2)


def test_other_passes_have_none() -> None:
    mask, stages = AttnMask.varlen([0, 60, 192], causal=True), {"stages": 0, "heads": HEADS}
    contiguous, owner = Layout.contiguous(TOKENS, 2), {"assignment": "owner", **stages}
    hosts = replace(CostModel.over("2x1"), held_shards=math.inf)
    plans = {
        "scattered": make_plan(mask, Layout.striped(TOKENS, 2, block=4), **owner),
        "rows move": make_plan(mask, contiguous, assignment="balanced", **stages),
        "hosts": make_plan(mask, contiguous, costs=hosts, **owner),
        "held keys": make_plan(mask, contiguous, **owner).variant(held_keys=1),
        "groups of heads": make_plan(mask, contiguous, head_groups=2, **owner),
        "many ranks": make_plan(mask, Layout.contiguous(TOKENS, 12), **owner),
    }
    assert plans["rows move"].rows_move
    found = {name: gathered_moves(plan, 1) for name, plan in plans.items()}
    assert found == dict.fromkeys(plans)
    assert gathered_moves(make_plan(mask, contiguous, **owner), 1) is not None


def test_a_plan_that_travelled_is_alike() -> None:
    for ends in ([0, 88, 140, 192], [0, 91, 192], [0, 60, 192]):
        mask = AttnMask.varlen(ends, causal=True)
        plan = make_plan(mask, Layout.contiguous(TOKENS, 2), heads=HEADS)
        prepare(plan, 1)
        plan_module._PLANS.clear()
        there = pickle.loads(pickle.dumps(plan))
        assert there is not plan and there.rounded == plan.rounded
        assert gathered_moves(there, 1) == gathered_moves(plan, 1) is not None
        assert there.kv_needed.tolist() == plan.kv_needed.tolist()
        assert fingerprint(there, 1) == fingerprint(plan, 1)
