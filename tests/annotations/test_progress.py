"""Progress is shown on a terminal, by the first rank, and only of what takes long."""

from __future__ import annotations

import io
import sys
import time

import pytest
import torch.distributed as dist
import tqdm

from annotations import progress


class Stream(io.StringIO):
    """What is written to stderr, which may be a terminal."""

    def __init__(self, terminal: bool = True) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


class Clock:
    """What shows progress reads the time here, and it passes only where a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(tqdm.std, "time", lambda: self.now)
        monkeypatch.setattr(progress, "DELAY", 0.05)


def wait_for_a_line(stream: Stream) -> None:
    """Until another thread has written, however late that thread gets a core."""
    end = time.monotonic() + 60
    while not stream.getvalue() and time.monotonic() < end:
        time.sleep(0.01)


def shown(monkeypatch: pytest.MonkeyPatch, stream: Stream, seconds: float) -> str:
    """What a stage and a count of three, each of so many seconds, write."""
    clock = Clock(monkeypatch)
    first = not dist.is_initialized() or dist.get_rank() == 0
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        with progress.stage("solving"):
            clock.now += seconds
            if seconds and first and stream.terminal:
                wait_for_a_line(stream)
            else:
                time.sleep(4 * progress.DELAY)  # several chances to write
        items = []
        for item in progress.counted("abc", "strategies"):
            items.append(item)
            clock.now += seconds / 3
    assert items == ["a", "b", "c"]
    return stream.getvalue()


def test_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, Stream(), 0.5)
    assert "solving: 00:00" in text
    assert "strategies:" in text and "2/3" in text
    assert text.endswith("\r")  # what was shown is gone
    assert not text.split("\r")[-2].strip()


def test_work_that_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, Stream(), 0.0) == ""


def test_where_it_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, Stream(terminal=False), 0.2) == ""


def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    assert shown(monkeypatch, Stream(), 0.2) == ""


def test_a_failure_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, clock = Stream(), Clock(monkeypatch)
    monkeypatch.setattr(sys, "stderr", stream)
    with pytest.raises(ValueError, match="no plan"), progress.stage("solving"):
        clock.now += 0.3
        wait_for_a_line(stream)
        raise ValueError("no plan")
    assert "solving" in stream.getvalue()
