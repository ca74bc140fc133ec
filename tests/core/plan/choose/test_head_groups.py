"""In how many groups of heads keys arrive: what it is chosen by."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from customized_ops.ring_attention.core.comm.inprocess import InProcessComm, run_ranks
from customized_ops.ring_attention.core.cost import H200, CostModel
from customized_ops.ring_attention.core.kernels import (
    KERNELS,
    BackwardOperands,
    ForwardOperands,
    Scoring,
)
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.core.plan.choose import head_groups
from customized_ops.ring_attention.core.plan.choose.head_groups import RankTimes
from customized_ops.ring_attention.core.plan.choose.rates import Rates
from customized_ops.ring_attention.core.plan.cost_model import H200_NCCL
from customized_ops.ring_attention.core.plan.heads import Sizes
from customized_ops.ring_attention.core.plan.report.figures import measures
from customized_ops.ring_attention.core.run.executor import attention_backward, attention_forward

BETWEEN_HOSTS = replace(H200_NCCL, link_bytes=50e9)
HEADS = (32, 8)
SIZES = Sizes(*HEADS, 128, 128, 2)


def causal(per_rank: int, ranks: int = 2, costs: CostModel = BETWEEN_HOSTS, **options) -> Plan:
    """Zigzag, all ranks do the same."""
    tokens, heads = per_rank * ranks, options.pop("heads", HEADS)
    mask = AttnMask.dense(tokens, causal=True)
    return make_plan(mask, Layout.zigzag(tokens, ranks), heads=heads, costs=costs, **options)


def test_two_ranks_by_hand():
    """Full attention: a shard of own keys, and one of received ones. Seconds are unit shards."""
    tokens = 1024
    plan = make_plan(AttnMask.dense(2 * tokens), Layout.contiguous(2 * tokens, 2), stages=1)
    local, local_back = H200.attend_seconds(tokens**2, 32, 128, 128)
    keys_bytes = tokens * 8 * 256 * 2
    costs = CostModel(link_bytes=keys_bytes / (4 * local), step_seconds=0.0, call_seconds=0.0)
    link = 4 * local
    side_by_side = 2 * tokens * 32 * 128 * 2 / H200.memory_bytes

    def seconds(count: int, backward: bool) -> float:
        return RankTimes.of(plan, 0, costs, SIZES).pass_seconds(count, backward=backward)

    assert seconds(1, False) == pytest.approx(link + local)
    assert seconds(4, False) == pytest.approx(link + local / 4 + side_by_side / 4)
    assert seconds(1, True) == pytest.approx(max(link, local_back) + local_back + link)
    assert seconds(4, True) == pytest.approx(2 * link)  # never idle: keys come, gradients go
    slow_host = replace(costs, call_seconds=local)
    for count, calls in ((1, 2), (8, 9)):
        hosts = RankTimes.of(plan, 0, slow_host, SIZES).pass_seconds(count, backward=False)
        assert hosts >= calls * local


def test_slow_links_and_long_shards_are_worth_groups():
    plan = causal(8192)
    assert plan.head_groups > 1
    one = causal(8192, head_groups=1)
    rank = RankTimes.of(plan, 0, BETWEEN_HOSTS, SIZES)
    seconds = [rank.seconds(count) for count in (1, plan.head_groups)]
    assert seconds[1] < head_groups.FASTER * seconds[0]
    assert (one.steps, one.head_groups) == (plan.steps, 1)


@pytest.mark.parametrize(
    "plan",
    [
        causal(16384, costs=H200),
        causal(16384, costs=H200_NCCL),
        causal(64),  # the host's calls take longer than all else
        causal(8192, heads=(8, 1)),  # one key head
        causal(8192, ranks=4, team_size=2),
        make_plan(AttnMask.varlen([0, 4096, 8192]), Layout.contiguous(8192, 2)),
    ],
    ids=["NVLink", "NCCL", "little work", "one key head", "teams", "nothing moves"],
)
def test_one_group_elsewhere(plan):
    assert plan.head_groups == 1


def test_groups_that_the_passes_are_slower_with_are_not_taken():
    """Two ranks' times say that they would pay; the passes' count every call of the host."""
    tokens, slow = 4096, CostModel(link_bytes=25e9, step_seconds=48e-6)
    given = AttnMask.dense(tokens), Layout.contiguous(tokens, 2)
    one, plan = (make_plan(*given, costs=slow, head_groups=count) for count in (1, None))
    rates = Rates(slow, SIZES)
    count = head_groups.best_head_groups(one, rates.passes(one), slow, SIZES)
    grouped = make_plan(*given, costs=slow, head_groups=count)
    assert rates.seconds(grouped) > 1.1 * rates.seconds(one)
    assert plan.head_groups == 1


def test_every_rank_chooses_the_same():
    """It follows from the plan, whichever rank's part was made before."""
    chosen = causal(8192)
    again = causal(8192, head_groups=1)
    passes = BETWEEN_HOSTS.passes(again, *HEADS, 128, 128, 2)
    for rank in (1, 0):
        again.rank(rank)
        found = head_groups.best_head_groups(again, passes, BETWEEN_HOSTS, SIZES)
        assert found == chosen.head_groups


def test_the_next_group_is_asked_for_before_one_is_attended(monkeypatch):
    """And the gradients of one leave before the next is attended."""
    order: list[str] = []
    plan = causal(8, stages=1, head_groups=2, heads=(4, 2))

    def noting(what: str, function, rank_of):
        def noted(*given, **options):
            if rank_of(given) == 0:
                order.append(what)
            return function(*given, **options)

        return noted

    for name in ("fetch", "send_home"):
        function = noting(name, getattr(InProcessComm, name), lambda given: given[0].rank)
        monkeypatch.setattr(InProcessComm, name, function)

    def body(comm):
        reference = KERNELS["reference"]
        kernel = SimpleNamespace(
            forward=noting("attend", reference.forward, lambda _: comm.rank),
            backward=noting("attend", reference.backward, lambda _: comm.rank),
        )
        q, k = torch.randn(1, 8, 4, 8), torch.randn(1, 8, 2, 8)
        out, lse = attention_forward(plan, comm, kernel, ForwardOperands(q, k, k), Scoring(0.3))
        order.extend(["turn"] * (comm.rank == 0))
        given = BackwardOperands(out, q, k, k, out, lse)
        attention_backward(plan, comm, kernel, given, Scoring(0.3))

    run_ranks(2, body)
    turn = order.index("turn")
    assert order[:turn] == ["fetch", "attend", "fetch", "attend", "attend"]
    home = ["attend", "send_home"]
    assert order[turn + 1 :] == ["fetch", "attend", "fetch", *home, *home]


def test_report_and_figures():
    plan = causal(8192, stages=1, head_groups=4)
    text = plan.report()
    assert "groups    4 of key heads: keys of one arrive while those before are attended" in text
    assert measures(plan, *HEADS, 128).calls.tolist() == [5, 5]
    assert "groups " not in causal(8192, stages=1, head_groups=1).report()
    gathered = causal(8192, stages=0, head_groups=2)
    assert measures(gathered, *HEADS, 128).calls.tolist() == [2, 2]
    costs = replace(BETWEEN_HOSTS, call_seconds=1.0, batch_seconds=0.006, message_seconds=0.001)
    launch = [costs.passes(each, *HEADS, 128, 128, 2)[0] for each in (plan, gathered)]
    assert [each.launch.max() for each in launch] == pytest.approx([5.04, 2.02])
    assert all(each.overlap for each in launch)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"head_groups": 0}, "head_groups must be 1 to the 8 key heads, got 0"),
        ({"head_groups": 9}, "head_groups must be 1 to the 8 key heads, got 9"),
        (
            {"head_groups": 2, "team_size": 2},
            "head_groups=2 needs team_size=1, got 2: heads are split between ranks or in groups, "
            "not both",
        ),
        (
            {"head_groups": 2, "heads": (9, 2)},
            "query heads must be a multiple of key heads to be assigned to 2 ranks, got 9 and 2",
        ),
    ],
)
def test_what_cannot_be(options, text):
    with pytest.raises(ValueError) as error:
        causal(64, **options)
    assert str(error.value) == text
