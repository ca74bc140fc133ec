"""Tests of watches over waits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from customized_ops.ring_attention.core.comm import notes, patience
from customized_ops.ring_attention.core.comm.signals import record as of
from customized_ops.ring_attention.core.comm.signals import watch as watch_module

from . import watch_cases
from .watch_cases import Store


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    made = Store()
    for module in (patience, watch_module):
        monkeypatch.setattr(module, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(notes, "_get_process_group_store", lambda group: made)
    monkeypatch.setattr(notes.dist, "get_process_group_ranks", lambda group: [0, 1])
    yield made
    while watch_cases.records:  # nobody waits any more, so threads that look on do not, either
        record = watch_cases.records.pop()
        record[of.SLOTS :], record[of.ENDED] = of.NOTHING, 1 << 40


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process, which nobody asks for when it has ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
