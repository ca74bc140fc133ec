"""A watch over a rank's waits, with a store of its own."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from customized_ops.ring_attention.core.comm.links import host_names
from customized_ops.ring_attention.core.comm.patience import Patience, PeerFailed
from customized_ops.ring_attention.core.comm.signals import record as of
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


class Group:
    """The first of two ranks."""

    def rank(self) -> int:
        return 0

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=100)))


records: list[Any] = []  # of the test that runs


def watched(seconds: float = 100.0, stop: Callable[[], None] = lambda: None) -> tuple[Watch, Any]:
    record = np.zeros(of.record_length(3), dtype=np.int64)
    waits = Patience(Group())  # type: ignore[arg-type]
    waits.most_seconds = seconds
    made = Watch(waits, record, stop)
    made.name(FORWARD, PASS)
    records.append(record)
    return made, record


def told(record: Any, status: int, theirs: int = 0, peer: int = 1) -> None:
    """As a kernel does: the status last."""
    at = of.SLOTS + of.SLOT_LENGTH * peer
    record[at + of.CALL], record[at + of.THEIRS] = FORWARD, theirs
    record[at + of.STATUS] = status


def until(happens: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not happens():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def ended(process: subprocess.Popen[bytes]) -> str:
    """Its name."""
    name = host_names.name_of(process.pid)
    assert not host_names.has_ended(name)
    process.kill()
    until(lambda: host_names.has_ended(name))
    return name


def problem_of(watch: Watch) -> str:
    with pytest.raises(PeerFailed) as caught:
        watch.check(PASS)
    return str(caught.value)


SAYS_WHY = ("warnings are told", "warnings are errors")  # ways of a program to end
OUT_OF_MEMORY = "ring attention, forward: OutOfMemoryError: 20 GiB"
FAILED = json.dumps([(3, OUT_OF_MEMORY)]).encode()
