"""What the host makes of what a GPU tells about its waits."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from annotations import waiting
from customized_ops.ring_attention.core.comm import notes, patience
from customized_ops.ring_attention.core.comm.links import host_names
from customized_ops.ring_attention.core.comm.patience import Patience, PeerFailed
from customized_ops.ring_attention.core.comm.signals import record as of
from customized_ops.ring_attention.core.comm.signals import watch as watch_module
from customized_ops.ring_attention.core.comm.signals.fingerprint import Meeting, disagreement
from customized_ops.ring_attention.core.comm.signals.watch import Watch

FORWARD, BACKWARD = 0x0001_0002_0003_0004, 0x0001_0002_0003_0005
PASS = "ring attention, forward"
WAITS = "gpu waits/0"  # where the first of two ranks writes
START = "ring attention, forward: rank 0 of the group of ranks [0, 1]"


class Store(dict[str, bytes]):
    """As a group's."""

    def check(self, keys: list[str]) -> bool:
        return keys[0] in self

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def says(self, key: str) -> bool:
        return bool(super().get(key))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    for module in (patience, watch_module):
        monkeypatch.setattr(module, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(notes, "_get_process_group_store", lambda group: made)
    monkeypatch.setattr(notes.dist, "get_process_group_ranks", lambda group: [0, 1])
    return made


class Group:
    """The first of two ranks."""

    def rank(self) -> int:
        return 0

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=100)))


def watched(seconds: float = 100.0, stop: Callable[[], None] = lambda: None) -> tuple[Watch, Any]:
    record = np.zeros(of.record_length(3), dtype=np.int64)
    waits = Patience(Group())  # type: ignore[arg-type]
    waits.most_seconds = seconds
    made = Watch(waits, record, stop)
    made.name(FORWARD, PASS)
    return made, record


def told(record: Any, status: int, theirs: int = 0, peer: int = 1) -> None:
    """As a kernel does: the status last."""
    at = of.slot(peer)
    record[at + of.CALL], record[at + of.THEIRS] = FORWARD, theirs
    record[at + of.STATUS] = status


def until(happens: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not happens():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process, which nobody asks for when it has ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def ended(process: subprocess.Popen[bytes]) -> str:
    """Its name."""
    name = host_names.name_of(process.pid)
    assert not host_names.has_ended(name)
    process.kill()
    until(lambda: host_names.has_ended(name))
    return name


def test_processes_that_have_ended(other: subprocess.Popen[bytes]) -> None:
    number, started, *system = ended(other).split()
    assert host_names.name_of(other.pid) == "", "it is not one any more"
    of_before = [str(os.getpid()), started, *system]  # whose number this one has got
    assert host_names.has_ended(" ".join(of_before))
    for elsewhere in ("", f"{number} {started}", f"{number} {started} another-host {system[1]}"):
        assert not host_names.has_ended(elsewhere)


def problem_of(watch: Watch) -> str:
    with pytest.raises(PeerFailed) as caught:
        watch.check(PASS)
    return str(caught.value)


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


OUT_OF_MEMORY = "ring attention, forward: OutOfMemoryError: 20 GiB"
FAILED = json.dumps([(3, OUT_OF_MEMORY)]).encode()
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


# Programs that end by themselves or by an error, each in a process of its own, forked from one
# that has imported what takes seconds.
ENDS = """
import json, os, sys, time, warnings
from types import SimpleNamespace
import test_watch as test
import torch

folder, *cases = sys.argv[1:]
children = []
for case in cases:
    if not (child := os.fork()):
        for n, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{case}.{name}", os.O_CREAT | os.O_WRONLY), n)
        break
    children.append(child)
else:
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]))
    sys.exit()

test.notes._get_process_group_store = lambda group: test.Store()
test.notes.dist.get_process_group_ranks = lambda group: [0, 1]
if case != "warnings are told":
    warnings.simplefilter("error" if case == "warnings are errors" else "ignore")
if case in test.SAYS_WHY:
    watch, record = test.watched()
    test.told(record, test.of.DIFFERS, test.BACKWARD)
    raise RuntimeError("CUDA error: unspecified launch failure")

def synchronize():
    if case == "stops":
        raise RuntimeError("CUDA error: unspecified launch failure")
    if case == "blocks":
        time.sleep(60)
def stop():
    if case == "stop blocks":
        time.sleep(60)
torch.cuda.current_stream = lambda device: SimpleNamespace(synchronize=synchronize)
test.watch_module.STOP_SECONDS, test.watch_module.LOOK_SECONDS = 1.5, 0.2
watch, record = test.watched(stop=stop)
watch._patience.device = torch.device("cuda", 0)
test.told(record, test.of.DIFFERS, test.BACKWARD)
time.sleep(4)
print("it goes on")
"""
SAYS_WHY = ("warnings are told", "warnings are errors")
TOLD_TO_STOP = ("stops", "goes on", "blocks", "stop blocks")


def test_the_end_of_a_process(tmp_path: Path) -> None:
    """It says why: the thread may not have looked by then, and warnings may be errors. Where a GPU
    does not stop that was told to, the process ends, even if the driver or NCCL does not answer."""
    paths = ":".join([os.path.dirname(__file__), *sys.path])
    cases = [*SAYS_WHY, *TOLD_TO_STOP]
    command = [sys.executable, "-c", ENDS, str(tmp_path), *cases]
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    for case, code in zip(cases, json.loads(done.stdout), strict=True):
        out, err = ((tmp_path / f"{case}.{name}").read_text() for name in ("out", "err"))
        if case in SAYS_WHY:
            _, said = err.split("RuntimeError: CUDA error: unspecified launch failure\n")
            assert code == 1 and "do not agree on tensors or options" in said, (case, err)
        elif case == "stops":
            assert (code, out) == (0, "it goes on\n"), (case, err)
        else:
            assert code == -signal.SIGABRT, (case, code, err)
            said = "tensors or options; its GPU goes on 2 s later, so the process ends"
            assert said in err, (case, err)


@pytest.mark.filterwarnings("ignore:ring attention")
def test_a_gpu_is_told_to_stop_where_python_starts_no_thread(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the end of a program."""

    def fails(*_: Any) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Timer, "start", fails)
    monkeypatch.setattr(torch.cuda, "current_stream", fails)
    stopped: list[bool] = []
    watch, record = watched(stop=lambda: stopped.append(True))
    watch._patience.device = torch.device("cuda", 0)
    told(record, of.DIFFERS, BACKWARD)
    until(lambda: stopped)
    assert record[of.STOP]


@pytest.mark.filterwarnings("ignore:ring attention")
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


@pytest.mark.filterwarnings("ignore:ring attention")
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


@pytest.mark.filterwarnings("ignore:ring attention")
def test_what_a_rank_has_found_stays_told(store: Store) -> None:
    """Its next error is that of its device, which says less."""
    watch, record = watched()
    told(record, of.DIFFERS, BACKWARD)
    until(lambda: watch.problem)
    watch._patience.tell_failure(PASS, 3, RuntimeError("CUDA error: unspecified launch failure"))
    assert json.loads(store["failed/0"])[-1][1].endswith("do not agree on tensors or options")


@pytest.mark.filterwarnings("ignore:ring attention")
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


@pytest.mark.filterwarnings("ignore:ring attention")
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


@pytest.mark.filterwarnings("ignore:ring attention")
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


@pytest.mark.filterwarnings("ignore:ring attention")
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


@pytest.mark.filterwarnings("ignore:ring attention")
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
