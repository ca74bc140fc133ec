"""Progress is shown on a terminal, by the first rank, and only of what takes long."""

from __future__ import annotations

import io
import sys
import time

import pytest
import torch.distributed as dist

from annotations import progress


class Stream(io.StringIO):
    """What is written to stderr, which may be a terminal."""

    def __init__(self, terminal: bool = True) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def shown(monkeypatch: pytest.MonkeyPatch, stream: Stream, seconds: float) -> str:
    """What a stage and a count of three, each of so many seconds, write."""
    monkeypatch.setattr(progress, "DELAY", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        with progress.stage("solving"):
            time.sleep(seconds)
        items = []
        for item in progress.counted("abc", "strategies"):
            items.append(item)
            time.sleep(seconds / 3)
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
    stream = Stream()
    monkeypatch.setattr(progress, "DELAY", 0.05)
    monkeypatch.setattr(sys, "stderr", stream)
    with pytest.raises(ValueError, match="no plan"), progress.stage("solving"):
        time.sleep(0.3)
        raise ValueError("no plan")
    assert "solving" in stream.getvalue()
