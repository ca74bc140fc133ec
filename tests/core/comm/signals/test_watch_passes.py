"""Which passes the host waits for, and what it keeps of failures."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from annotations import waiting
from customized_ops.ring_attention.core.comm import notes
from customized_ops.ring_attention.core.comm.signals import record as of
from customized_ops.ring_attention.core.comm.signals.fingerprint import Meeting

from .watch_cases import (
    BACKWARD,
    FAILED,
    FORWARD,
    PASS,
    START,
    WAITS,
    Store,
    ended,
    problem_of,
    told,
    until,
    watched,
)

pytestmark = pytest.mark.filterwarnings("ignore:ring attention")


def test_a_pass_without_an_end(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels of others wait, the record counts passes."""
    monkeypatch.setenv(waiting.PATIENCE, "0.04")
    watch, record = watched()
    watch.check(PASS)
    for _ in range(3):
        record[of.ENDED] = watch.begin(FORWARD)
    time.sleep(0.2)
    assert not store.says(WAITS)
    with pytest.warns(UserWarning, match="rank 1 has not come"):
        assert watch.begin(FORWARD) == 4
        until(lambda: store.says(WAITS))
        time.sleep(0.2)
        record[of.ENDED] = 4
        until(lambda: not store.says(WAITS))
    watch.check(PASS)
    watch.begin(FORWARD)
    store["failed/1"] = FAILED
    until(lambda: watch.problem)
    assert "rank 1 failed" in problem_of(watch)


def test_a_peer_that_ends_before_a_pass_does(
    store: Store, other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is lost, unless its program was done."""
    peer, _ = watched()
    store.set("process/1", ended(other))
    watch, record = watched()
    monkeypatch.setattr(peer._patience._notes, "rank", 1)
    monkeypatch.setattr(peer._patience._notes, "peers", [0])
    peer.begin(FORWARD)
    monkeypatch.setattr(sys, "last_value", RuntimeError(), raising=False)
    peer.at_exit()
    assert not store.says("left/1"), "it ends by an error"
    monkeypatch.delattr(sys, "last_value")
    peer.at_exit()
    watch.begin(FORWARD)
    time.sleep(0.2)
    assert watch.problem is None
    store.set("left/1", "1")  # before the pass that waits
    watch.begin(FORWARD)
    record[of.ENDED] = 1
    until(lambda: watch.problem)
    assert problem_of(watch).endswith("lost rank 1: its process ended")


def test_what_a_rank_has_found_stays_told(store: Store) -> None:
    """Its next error is that of its device, which says less."""
    watch, record = watched()
    told(record, of.DIFFERS, BACKWARD)
    until(lambda: watch.problem)
    watch._patience.tell_failure(PASS, 3, RuntimeError("CUDA error: unspecified launch failure"))
    assert json.loads(store["failed/0"])[-1][1].endswith("do not agree on tensors or options")


def test_a_failure_is_told_though_passes_differ_after_it(store: Store) -> None:
    """A rank that goes on after its error meets its peers in other passes; they read the error."""
    faulty, record = watched()
    faulty._patience.tell_failure(PASS, 3, RuntimeError("20 GiB"))
    told(record, of.DIFFERS, BACKWARD)
    until(lambda: faulty.problem)
    store["failed/1"] = store["failed/0"]
    peer, record = watched()
    told(record, of.WAITS)
    until(lambda: peer.problem)
    assert problem_of(peer).endswith(
        "rank 1 failed in ring attention, forward: RuntimeError: 20 GiB"
    )


def test_passes_are_looked_after_once_one_has_failed(store: Store) -> None:
    watch, record = watched()
    for _ in range(3):
        record[of.ENDED] = watch.begin(FORWARD)
    watch.begin(FORWARD)
    watch.forget()
    assert watch.begin(FORWARD) == 4
    store["failed/1"] = FAILED
    until(lambda: watch.problem)
    assert "rank 1 failed" in problem_of(watch)


def test_a_lost_store(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever keeps it may be done, and what is waited for be here: so it is not at once an error.
    It is one in the end, for the thread as for anybody."""
    monkeypatch.setenv(waiting.PATIENCE, "0.2")
    watch, record = watched()
    monkeypatch.setattr(store, "check", _lost)
    watch.begin(FORWARD)
    time.sleep(0.2)
    assert watch.problem is None
    until(lambda: record[of.STOP])
    assert "lost the group's store" in problem_of(watch)


def _lost(keys: list[str]) -> bool:
    raise RuntimeError("Broken pipe")


def test_peers_in_other_passes_are_not_waited_for(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of other sizes may never be here; passes are compared where both have waited for
    long, by their numbers, for one may be ahead."""
    monkeypatch.setenv(waiting.PATIENCE, "0.04")
    stopped: list[bool] = []
    watch, record = watched(stop=lambda: stopped.append(True))
    watch.check("a later pass")
    assert [watch.begin(call) for call in (BACKWARD, *[FORWARD] * 50)] == [*range(1, 52)]
    record[of.ENDED] = 1  # the host is far ahead
    ahead = {1: BACKWARD, 2: FORWARD, 3: FORWARD, 99: BACKWARD}
    store.set("gpu waits/1", notes.waits_text("ring attention, backward", ahead))
    until(lambda: store.says(WAITS))
    time.sleep(0.1)
    assert watch.problem is None
    store.set("gpu waits/1", notes.waits_text("ring attention, forward", {2: BACKWARD}))
    until(lambda: stopped)
    assert problem_of(watch) == f"{START} and rank 1 do not agree on tensors or options"
    assert record[of.STOP]


COMPARES = "ring attention, where ranks compare how many tokens they hold"
GROWS = "where memory for exchanges is made"  # which this rank's pass does not need
OTHER = "do not make the same calls in the same order: it waits in"


@pytest.mark.parametrize(
    ("doing", "harmless", "wrong", "problem"),
    [
        # The same, or not yet here.
        (
            COMPARES,
            {7: Meeting(PASS), 100: Meeting("ring attention, backward")},
            Meeting(COMPARES),
            f"{OTHER} {COMPARES}, not in {PASS}",
        ),
        (
            GROWS,
            {7: Meeting(PASS, FORWARD)},
            Meeting(PASS, BACKWARD),
            "do not agree on tensors or options",
        ),
    ],
    ids=["something else", "another pass"],
)
def test_a_peer_whose_host_waits_in(
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    doing: str,
    harmless: dict[int, Meeting],
    wrong: Meeting,
    problem: str,
) -> None:
    """It met something that this rank had met before; this rank's host may be far ahead."""
    monkeypatch.setenv(waiting.PATIENCE, "0.04")
    watch, record = watched()
    watch._patience.meetings = dict(enumerate([Meeting(PASS, FORWARD)] * 100))
    told(record, of.WAITS)
    for step, met in harmless.items():
        store.set("waits/1", notes.waits_text(met.what, {}, {step: met}))
        until(lambda: store.says(WAITS))
        time.sleep(0.1)
        assert watch.problem is None
    store.set("waits/1", notes.waits_text(doing, {}, {7: wrong}))
    until(lambda: record[of.STOP])
    want = f"{START} and rank 1 {problem}"
    assert problem_of(watch) == want
    assert json.loads(store["failed/0"])[-1][1] == want
