"""Fingerprints that travel with the first messages of a pass between GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from customized_ops.ring_attention.core.comm.signals import record as of
from customized_ops.ring_attention.core.comm.signals import stamps as module
from customized_ops.ring_attention.core.comm.signals.stamps import Stamps

FORWARD, BACKWARD, WHAT = 5, 6, "ring attention"
CPU = torch.device("cpu")


class Flags:
    """As those of a GPU."""

    def __init__(self, of_ranks: list[Tensor], rank: int, device: torch.device) -> None:
        self._here, self._ranks = of_ranks[rank], len(of_ranks)
        self.record = np.zeros(of.record_length(self._ranks), dtype=np.int64)
        self.differing: list[int] = []

    def wait(self, peers: list[int], channel: int, call: int) -> None:
        places = [channel * self._ranks + peer for peer in peers]
        self.differing += [p for p, n in zip(peers, places, strict=True) if self._here[n] != call]

    def mark(self, passes: int) -> None:
        self.record[of.ENDED] = passes


class Watch:
    """As the host's, without its thread."""

    def __init__(self, *_: Any) -> None:
        self.begun = 0

    def name(self, call: int, what: str) -> None:
        assert what == WHAT

    def check(self, what: str) -> None:
        assert what == WHAT

    def begin(self, call: int) -> int:
        self.begun += 1
        return self.begun

    def forget(self) -> None:
        self.begun -= 1


@pytest.fixture
def stamps(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "Flags", Flags)
    monkeypatch.setattr(module, "Watch", Watch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return Stamps(0, 3, CPU, None, print)  # type: ignore[arg-type]


def test_each_peer_gets_one_a_pass(stamps: Any) -> None:
    rows = torch.zeros(4)
    for call in (FORWARD, BACKWARD):
        stamps.begin(call, WHAT)
        sent, received, first = stamps.add_to({1: [rows]}, {1: [rows], 2: [rows]})
        assert first == [1, 2] and [len(each) for each in received.values()] == [2, 2]
        assert int(sent[1][1]) == call
        for peer, theirs in ((1, call), (2, FORWARD)):
            received[peer][1].fill_(theirs)
        stamps.comparing(lambda: None, first)()
        sent, received, first = stamps.add_to({2: [rows]}, {1: [rows]})
        assert int(sent[2][1]) == call and received == {1: [rows]} and not first
        assert stamps.add_to({2: [rows]}, {1: [rows]}) == ({2: [rows]}, {1: [rows]}, [])
        stamps.end()
        assert stamps.add_to({1: [rows]}, {}) == ({1: [rows]}, {}, []), "between passes"
    assert stamps._flags.differing == [2]


def test_what_is_made_in_inference_mode_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Flags", Flags)
    monkeypatch.setattr(module, "Watch", Watch)
    with torch.inference_mode():
        made = Stamps(0, 3, CPU, None, print)  # type: ignore[arg-type]
    assert not made._arrived.is_inference()


def test_passes_are_counted_unless_they_are_captured(
    stamps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_pass(call: int = FORWARD) -> Tensor:
        stamps.begin(call, WHAT)
        stamp: Tensor = stamps.add_to({1: []}, {})[0][1][0]
        stamps.end()
        return stamp

    record, watch = stamps._flags.record, stamps._watch
    kept = one_pass()
    assert (record[of.ENDED], watch.begun) == (1, 1) and one_pass() is kept
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    made = one_pass(BACKWARD)
    assert (record[of.ENDED], watch.begun) == (2, 2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert one_pass(BACKWARD) is not made, "its memory is the graph's"
    stamps.begin(FORWARD, WHAT)
    for _ in range(2):  # the second time there is no pass
        stamps.fail()
        assert record[of.ENDED] == watch.begun, "nobody waits for its end"
