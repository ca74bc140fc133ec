"""What moves in passes that gather keys and attend them in one call."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest
import torch
from dense import dense_gradients
from one_sided_memory import InProcessOneSided

from customized_ops.ring_attention.core.comm import inprocess
from customized_ops.ring_attention.core.comm.inprocess import InProcessComm
from customized_ops.ring_attention.core.comm.signals import fingerprint
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import make_plan
from customized_ops.ring_attention.core.plan import plan as plan_module
from customized_ops.ring_attention.core.plan.cost_model import CostModel
from customized_ops.ring_attention.core.run.call_pairs import gathered_moves, prepare

from .numerics_cases import SCALE, draw, run

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


DOCUMENTS = AttnMask.varlen([0, 20, 84, 100, 131], causal=True)
# The ranges of two ranks; the document of 64 tokens is cut in two.
PIECES = {
    "in front": ([(20, 52), (100, 131)], [(52, 84), (0, 20), (84, 100)]),
    "to the first rank": ([(52, 84), (0, 20), (84, 100)], [(20, 52), (100, 131)]),
    "from both ends": ([(20, 36), (68, 84), (0, 20)], [(36, 68), (84, 131)]),
    "not in front": ([(20, 52), (100, 131)], [(0, 20), (52, 84), (84, 100)]),
    "falling": ([(20, 52), (84, 100)], [(52, 84), (100, 131), (0, 20)]),
}


@pytest.mark.parametrize("comm", [InProcessComm, InProcessOneSided], ids=["messages", "one-sided"])
@pytest.mark.parametrize("name", PIECES)
def test_own_tokens_stay_as_they_are_held(
    name: str, comm: type[InProcessComm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where what is received comes before them; the results are right wherever it comes."""
    monkeypatch.setattr(inprocess, "InProcessComm", comm)
    layout = Layout.from_ranges([*PIECES[name]])
    plan = make_plan(DOCUMENTS, layout, stages=0, assignment="owner", heads=HEADS)
    assert plan.is_gather
    follow = name in ("in front", "to the first rank")
    assert (gathered_moves(plan, 0) is not None) == follow
    *qkv, dout = draw(DOCUMENTS, torch.float64)
    found, _ = run(plan, [*qkv, dout])
    wanted = dense_gradients(*qkv, DOCUMENTS, SCALE, dout)
    for mine, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-10)
