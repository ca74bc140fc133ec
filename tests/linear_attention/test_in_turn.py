"""Segments that wait for the state of the one before them, rather than for maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import conv_cases
import linear_cases
import numpy as np
import pytest
import torch
from linear_cases import LinearCase, check
from one_sided_memory import InProcessOneSided
from torch import Tensor

from customized_ops.along_sequence import KernelChoice, segments_of
from customized_ops.causal_conv1d import wrap_causal_conv1d_func
from customized_ops.linear_attention import chains, wrap_gated_delta_rule_func
from customized_ops.linear_attention.chains import MapBytes, scan_of
from customized_ops.linear_attention.kernels import torch_chunks
from customized_ops.ring_attention import Layout, run_ranks
from customized_ops.ring_attention.core.comm import inprocess
from customized_ops.ring_attention.core.comm.patience import PeerFailed
from customized_ops.ring_attention.core.plan.cost_model import H200

ALIKE, DIAGONAL = MapBytes(64, 64), MapBytes(1, 64)  # dk is dv; gates alone


@pytest.fixture
def one_sided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inprocess, "InProcessComm", InProcessOneSided)


def scan(layout: Layout, of_map: MapBytes, *lengths: int, backward: bool = False) -> Any:
    ends = np.cumsum([0, *(lengths or [layout.total])])
    return scan_of(segments_of(layout, ends), of_map, H200, backward)


@pytest.mark.parametrize("backward", [False, True])
def test_which_chains_go_in_turn(backward: bool) -> None:
    """Those in which maps would leave no fewer tokens to run one after the other."""
    for ranks, of_map, contiguous, zigzag in (
        (2, ALIKE, True, True),
        (2, DIAGONAL, True, True),
        (3, ALIKE, True, True),
        (3, DIAGONAL, False, False),
        (4, ALIKE, False, False),
        (8, DIAGONAL, False, False),
    ):
        layouts = Layout.contiguous(48, ranks), Layout.zigzag(48, ranks)
        for layout, expected in zip(layouts, (contiguous, zigzag), strict=True):
            found = scan(layout, of_map, backward=backward)
            assert found.in_turn == expected, (ranks, of_map, layout.spec)
            if expected:
                assert found.tokens == 48
                sent = found.received_bytes(of_map).sum()
                assert sent == of_map.b * (len(found.rank) - 1)  # a state for each but the first
    assert scan(Layout.contiguous(48, 4), ALIKE, backward=backward).tokens == 36  # 12 + 12, 12


def test_tokens_of_chains_side_by_side() -> None:
    """Document b waits for a's tokens on rank 1, which come first in the sequence."""
    found = scan(Layout.from_sizes([10, 8, 6]), ALIKE, 14, 10)
    assert found.in_turn and len(found.rounds) == 1
    assert found.known.tolist() == [0, 1, 0, 1] and found.tokens == 14.0


def test_no_more_turns_than_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stripes over two ranks: each turn is a call of the kernel."""
    turns = [[(0, 4), (8, 12), (16, 20)], [(4, 8), (12, 16), (20, 24)]]
    assert not scan(Layout.from_ranges(turns), ALIKE).in_turn
    monkeypatch.setattr(chains, "MOST_TURNS", 5)
    scan_of.cache_clear()
    assert scan(Layout.from_ranges(turns), ALIKE).in_turn
    scan_of.cache_clear()


class Counting:
    """The plain kernel, and how many tokens' states were asked of it, by pass."""

    def __init__(self) -> None:
        self.tokens = {"forward": 0, "backward": 0}

    def __getattr__(self, name: str) -> Any:
        return getattr(torch_chunks, name)

    def forward(self, x: Any) -> Any:
        return self._counted("forward", "states", x, torch_chunks.forward(x))

    def backward(self, x: Any, *given: Any) -> Any:
        return self._counted("backward", "initial", x, torch_chunks.backward(x, *given))

    def _counted(self, kind: str, method: str, x: Any, run: Any) -> Any:
        whole = getattr(run, method)

        def counted(states: Tensor | None) -> Any:
            self.tokens[kind] += int(x.ends[-1])
            return whole(states)

        setattr(run, method, counted)
        return run


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_nothing_is_run_twice_over_two_ranks(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Counting()
    monkeypatch.setattr(KernelChoice, "choose", lambda *_: kernel)
    case = LinearCase(24, batch=1, layout=layout, states="")
    check(case, case.in_process(2), case.expected())
    for kind in kernel.tokens:
        kernel.tokens[kind] = 0
    case.in_process(2)
    assert kernel.tokens == {"forward": 24, "backward": 24}


@pytest.mark.filterwarnings("ignore:Layout.balanced")
@pytest.mark.parametrize("cases", [linear_cases, conv_cases])
def test_by_writing_to_peers(one_sided: None, cases: Any) -> None:
    """Random cases, over up to 8 ranks; and the same one again, in places that were used before."""
    for seed in range(1000, 1020):
        case, ranks = cases.random_case(seed)
        expected = case.expected()
        for _ in range(2):
            cases.check(case, case.in_process(ranks), expected)


def test_many_rounds_by_writing_to_peers(one_sided: None) -> None:
    case = LinearCase(70, batch=1, layout="zigzag", seed=5)
    for ranks in (2, 3, 4, 7):
        check(case, case.in_process(ranks), case.expected())
        check(case, replace(case, layout="striped").in_process(ranks), case.expected())


def calls(group: Any, lengths: Sequence[int]) -> None:
    """Of the delta rule over documents."""
    ends, layout = [0, *np.cumsum(lengths).tolist()], Layout.contiguous(16, 2)
    where = {"process_group": group, "layout": layout, "cu_seqlens": ends}
    x = torch.ones(1, 8, 2, 4)
    gates = torch.zeros(1, 8, 2), torch.ones(1, 8, 2)
    wrap_gated_delta_rule_func(x, x, x, *gates, **where)


def convolutions(group: Any, lengths: Sequence[int]) -> None:
    ends, layout = [0, *np.cumsum(lengths).tolist()], Layout.contiguous(16, 2)
    where = {"process_group": group, "layout": layout, "cu_seqlens": ends}
    wrap_causal_conv1d_func(torch.ones(1, 8, 4), torch.ones(4, 3), **where)


@pytest.mark.parametrize("op", [calls, convolutions])
def test_ranks_of_other_documents_are_told(
    one_sided: None, op: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where ranks do not compare their calls before, as on GPUs."""
    monkeypatch.setenv("SEQSHARD_CHECK", "0")

    def rank(group: Any) -> None:
        for _ in range(2):
            op(group, [16])
        op(group, [16] if group.rank else [15, 1])

    with pytest.raises(PeerFailed, match=r"do not agree on the mask or the documents"):
        run_ranks(2, rank)
