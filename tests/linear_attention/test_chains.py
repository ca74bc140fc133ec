"""What travels between ranks: which maps, in how many rounds, and how many bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from linear_cases import LinearCase, check

from annotations.rules import SplitSite
from customized_ops.along_sequence import segments_of
from customized_ops.linear_attention import chains, wrap_gated_delta_rule_func
from customized_ops.linear_attention.chains import MapBytes, scan_of
from customized_ops.linear_attention.op import GATED_DELTA_RULE
from customized_ops.linear_attention.rank_call import map_bytes
from customized_ops.ring_attention import Layout, run_ranks
from customized_ops.ring_attention.core.comm import Comm
from customized_ops.ring_attention.core.plan.cost_model import H200, CostModel

BYTES_ALONE = CostModel(link_bytes=1.0, step_seconds=0.0)  # a scan of least bytes
ONE_MAP = MapBytes(1, 1)


@pytest.fixture
def fresh() -> Iterator[None]:
    scan_of.cache_clear()
    yield
    scan_of.cache_clear()


def one_sequence(total: int, ranks: int) -> Any:
    return segments_of(Layout.contiguous(total, ranks), np.array([0, total]))


@pytest.mark.covering(1)
@pytest.mark.parametrize("radix", [2, 3, 4])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_every_radix(monkeypatch: pytest.MonkeyPatch, fresh: None, radix: int, layout: str) -> None:
    monkeypatch.setattr(chains, "RADIXES", (radix,))
    monkeypatch.setattr(Comm, "costs", BYTES_ALONE)
    monkeypatch.setattr(chains, "min", lambda scans, key: list(scans)[-1], raising=False)
    for delta in (True, False):
        case = LinearCase(24, delta, batch=1, dims=(2, 2), layout=layout)
        check(case, case.in_process(7), case.expected())
    segments = segments_of(case.layout_over(7), np.array([0, 24]))
    scan = scan_of(segments, ONE_MAP, BYTES_ALONE)
    assert scan is not None and len(scan.rounds) > 1


def test_rounds() -> None:
    """All at once over few ranks, or where bytes take no time; few bytes over many."""
    small, large = MapBytes(1 << 10, 1 << 10), MapBytes(1 << 26, 1 << 26)
    assert len(scan_of(one_sequence(64, 8), small, H200).rounds) == 1
    many = scan_of(one_sequence(4096, 64), large, H200)
    assert len(many.rounds) == 6
    assert many.received_bytes(large).sum(0).max() < 14 * (1 << 26)
    assert scan_of(one_sequence(64, 1), small, H200) is None


def test_two_ranks_move_one_state() -> None:
    """What begins with the document is a state: its matrix does not travel."""
    for backward, bytes_ in ((False, [[0, 8]]), (True, [[8, 0]])):
        scan = scan_of(one_sequence(8, 2), MapBytes(1000, 8), H200, backward)
        assert scan.received_bytes(MapBytes(1000, 8)).tolist() == bytes_


def test_documents_that_end_with_a_rank_move_nothing() -> None:
    segments = segments_of(Layout.contiguous(8, 2), np.array([0, 1, 4, 4, 8]))
    assert scan_of(segments, ONE_MAP, H200) is None
    segments = segments_of(Layout.contiguous(8, 2), np.array([0, 3, 5, 8]))
    assert segments.chained.tolist() == [1, 2]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("delta", [True, False])
def test_bytes_are_those_predicted(layout: str, delta: bool) -> None:
    """And as many for four times the tokens."""
    counted = []
    for tokens in (24, 96):
        case = LinearCase(tokens, delta, layout=layout, states="", seed=3)

        def rank(comm: Any, case: LinearCase = case) -> int:
            case.on_rank(comm, comm.rank, 4)
            return comm.counters.received_bytes

        received = run_ranks(4, rank)
        of_map = map_bytes(delta, False, case.batch, case.heads[1], *case.dims)
        of_map = MapBytes(2 * of_map.a, 2 * of_map.b)  # fp64
        segments = segments_of(case.layout_over(4), np.array([0, tokens]))
        both = [scan_of(segments, of_map, H200, back) for back in (False, True)]
        predicted = sum(scan.received_bytes(of_map).sum(0) for scan in both)
        assert received == predicted.tolist()
        counted.append(received)
    assert counted[0] == counted[1] and sum(counted[0]) > 0


@pytest.mark.parametrize("documents", [8, 16])
def test_bytes_of_final_states_are_those_predicted(documents: int) -> None:
    """Of documents that no rank cuts, nothing else moves."""
    case = LinearCase(48, batch=1, lengths=(48 // documents,) * documents, states="both")

    def rank(comm: Any) -> int:
        case.on_rank(comm, comm.rank, 4)
        return comm.counters.received_bytes

    given = {name: t.detach() for name, t in case.given.items()}
    given |= {"cu_seqlens": torch.tensor(case.cu_seqlens), "output_final_state": True, "layout": ""}
    given |= {"scale": 1.0, "kernel": "auto", "group": ""}
    op = GATED_DELTA_RULE[True].record
    bound = op.bind({name: given[name] for name in op.signature.parameters})
    cost = op.rule.cost(bound, SplitSite("l", 48, 4, ""), given, 8)
    predicted = 2 * (cost.forward_bytes + cost.backward_bytes)  # fp64
    assert run_ranks(4, rank) == [predicted] * 4 and predicted > 0


def test_segments() -> None:
    """Of the picture in the docstring."""
    segments = segments_of(Layout.zigzag(8, 2), np.array([0, 5, 8]))
    assert segments.rank.tolist() == [0, 1, 1, 0]
    assert segments.start.tolist() == [0, 2, 5, 6]
    assert segments.document.tolist() == [0, 0, 1, 1]
    local = segments.local(0)
    assert local.ends.tolist() == [0, 2, 4]
    assert local.entry.tolist() == [-1, 0] and local.entries == 1


def test_states_of_an_order_on_one_device() -> None:
    """Tokens in another order than the sequence's, as an engine has them before it cuts."""
    layout = Layout.from_ranges([[(5, 8), (0, 5)]])
    case = LinearCase(8, layout="contiguous", states="")
    given = {name: layout.shard(t.detach(), 0) for name, t in case.given.items()}
    out = layout.unshard([wrap_gated_delta_rule_func(**given, layout=layout)])
    assert torch.allclose(out, case.expected()[0], atol=1e-12)
