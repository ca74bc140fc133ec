"""What the host makes of what a GPU tells about its waits."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import time
import weakref

import pytest

from annotations import waiting
from customized_ops.ring_attention.core.comm.links import host_names
from customized_ops.ring_attention.core.comm.signals import record as of
from customized_ops.ring_attention.core.comm.signals.fingerprint import disagreement

from .watch_cases import (
    BACKWARD,
    FAILED,
    FORWARD,
    OUT_OF_MEMORY,
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


def test_processes_that_have_ended(other: subprocess.Popen[bytes]) -> None:
    number, started, *system = ended(other).split()
    assert host_names.name_of(other.pid) == "", "it is not one any more"
    of_before = [str(os.getpid()), started, *system]  # whose number this one has got
    assert host_names.has_ended(" ".join(of_before))
    for elsewhere in ("", f"{number} {started}", f"{number} {started} another-host {system[1]}"):
        assert not host_names.has_ended(elsewhere)


@pytest.mark.filterwarnings("ignore:ring attention")
def test_who_disagrees_and_on_what(store: Store) -> None:
    watch, record = watched()
    watch.check(PASS)
    told(record, of.DIFFERS, BACKWARD)
    until(lambda: watch.problem)
    want = f"{START} and rank 1 do not agree on tensors or options"
    assert problem_of(watch) == problem_of(watch) == want
    assert json.loads(store["failed/0"])[-1][1] == want, "the peer may find nothing by itself"
    assert record[of.STOP], "the device waits until the host has spoken"
    assert disagreement(1, FORWARD, 1).endswith("the same calls in the same order")


def test_a_long_wait_that_ends(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that is late is named, and nothing else happens."""
    monkeypatch.setenv(waiting.PATIENCE, "0.04")
    watch, record = watched()
    with pytest.warns(UserWarning, match="rank 1 has not come") as warned:
        told(record, of.WAITS)
        until(lambda: store.says(WAITS))
        until(lambda: warned.list)
        told(record, of.NOTHING)
        until(lambda: not store.says(WAITS))
    watch.check(PASS)
    assert not record[of.STOP] and str(warned[0].message).startswith(f"{START} has waited")


REASONS = [
    ("a failure", f"{START} cannot go on: rank 1 failed in {OUT_OF_MEMORY}"),
    ("an end", f"{START} lost rank 1: its process ended"),
    ("its time", f"{START} has waited 0 s: rank 1 has not come; its group's timeout is near"),
]


@pytest.mark.filterwarnings("ignore:ring attention")
@pytest.mark.parametrize(("why", "text"), REASONS, ids=[why for why, _ in REASONS])
def test_a_wait_in_vain_is_stopped(
    store: Store, other: subprocess.Popen[bytes], why: str, text: str
) -> None:
    store.set("process/1", host_names.name_of(other.pid))
    watch, record = watched(0.3 if why == "its time" else 100)
    if why == "a failure":
        store["failed/1"] = FAILED
    elif why == "an end":
        other.kill()
    told(record, of.WAITS)
    until(lambda: watch.problem)
    assert problem_of(watch) == text and record[of.STOP]


def test_the_thread_ends_with_its_watch(store: Store) -> None:
    watch, _ = watched()
    gone = weakref.ref(watch)
    del watch
    until(lambda: gc.collect() or gone() is None)


@pytest.mark.filterwarnings("ignore:ring attention")
def test_of_two_waits_one_ends(store: Store, other: subprocess.Popen[bytes]) -> None:
    """The other is still looked after; and it is not whoever has ended that matters, but whoever
    is waited for."""
    store.set("process/1", ended(other))
    watch, record = watched()
    told(record, of.WAITS, peer=2)
    time.sleep(0.1)
    assert watch.problem is None
    told(record, of.WAITS)
    told(record, of.NOTHING, peer=2)
    until(lambda: watch.problem)
    assert problem_of(watch).endswith("lost rank 1: its process ended")


@pytest.mark.filterwarnings("ignore:ring attention")
def test_a_difference_ends_other_waits(store: Store) -> None:
    """Also where the end of a pass is waited for, which does not come then."""
    watch, record = watched()
    watch.check(PASS)
    watch.begin(FORWARD)
    time.sleep(0.1)
    told(record, of.DIFFERS, BACKWARD)
    until(lambda: watch.problem)
