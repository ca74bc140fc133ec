"""Ranks that are in different passes find out as they wait, and what differs is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_sided_memory import InProcessOneSided

from customized_ops.ring_attention.core.comm import Comm, inprocess
from customized_ops.ring_attention.core.comm.inprocess import run_ranks
from customized_ops.ring_attention.core.comm.patience import PeerFailed
from customized_ops.ring_attention.core.comm.signals import NO_CALL, PARTS, differing, fingerprint
from customized_ops.ring_attention.core.comm.signals.fingerprint import over_plan
from customized_ops.ring_attention.core.kernels import KERNELS, ForwardOperands, Scoring
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.core.run.executor import attention_forward

RANKS, LENGTH = 2, 64
MASK = AttnMask.varlen([0, 40, LENGTH], causal=True)


def planned(mask: AttnMask = MASK, layout: Layout | None = None, **options: Any) -> Plan:
    return make_plan(mask, layout or Layout.contiguous(LENGTH, RANKS), stages=1, **options)


Call = tuple[Plan, Scoring, int]  # the last: the head dim of v
OTHERS: dict[str, Callable[[], Plan]] = {
    "the mask or the documents": lambda: planned(AttnMask.varlen([0, 41, LENGTH], causal=True)),
    "the layouts": lambda: planned(layout=Layout.from_sizes([33, 31])),
    "how the plan shares out the work": lambda: planned(heads=(4, 2), head_groups=2),
}


def test_fingerprints_are_those_of_values() -> None:
    assert fingerprint(planned(), "forward", 0.5) == fingerprint(planned(), "forward", 0.5)
    for part, other in OTHERS.items():
        assert part in differing(fingerprint(planned(), 1), fingerprint(other(), 1))
    few = planned().variant(few_senders=True)
    longer = planned().variant(rounded=True)
    assert len({fingerprint(each, 1) for each in (few, longer, planned())}) == 3
    assert differing(fingerprint(planned(), 1), fingerprint(planned(), 2)) == [PARTS[-1]]
    values = {fingerprint(planned(), n) for n in range(1000)}
    assert len(values) > 980 and 0 not in values
    assert all(-(1 << 63) <= value < 1 << 63 for value in values)
    assert differing(NO_CALL, NO_CALL) == []
    for other in (*(make() for make in OTHERS.values()), few):
        assert over_plan(other, fingerprint(planned(), "forward", 1)) == fingerprint(
            other, "forward", 1
        )


def both(first: Call, then: Callable[[int], Call]) -> list[Any]:
    """Three forwards of two ranks, and three others: by rank."""

    def body(comm: Comm) -> None:
        for plan, scoring, v_dim in [first] * 3 + [then(comm.rank)] * 3:
            tokens = plan.q_layout.sizes[comm.rank]
            shapes = [(1, tokens, heads, dim) for heads, dim in ((4, 8), (2, 8), (2, v_dim))]
            given = ForwardOperands(*(torch.ones(shape) for shape in shapes))
            attention_forward(plan, comm, KERNELS["reference"], given, scoring)

    return run_ranks(RANKS, body)


@pytest.fixture(autouse=True)
def writing_to_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inprocess, "InProcessComm", InProcessOneSided)


@pytest.mark.parametrize("what", [*OTHERS, "tensors or options", "another dim"])
def test_ranks_that_disagree_are_told(what: str) -> None:
    """Whatever of it would have gone wrong without a word."""
    ours: Call = planned(), Scoring(0.25), 8
    other: Call = ours[0], Scoring(0.26), 8
    if what in OTHERS:
        other = OTHERS[what](), *ours[1:]
    elif what == "another dim":
        other, what = (*ours[:2], 4), "tensors or options"
    larger: Call = *ours[:2], 64  # so that there is memory for all
    assert both(larger, lambda rank: ours) == [None] * RANKS
    with pytest.raises(PeerFailed, match=rf"rank \d and rank \d do not agree on .*{what}"):
        both(larger, lambda rank: other if rank else ours)


def test_memory_is_made_together() -> None:
    ours: Call = planned(), Scoring(0.25), 8
    larger: Call = *ours[:2], 64
    with pytest.raises(PeerFailed, match=r"in bytes: rank 0 \d+, rank 1 \d+$"):
        both(ours, lambda rank: (*ours[:2], 128) if rank else larger)
