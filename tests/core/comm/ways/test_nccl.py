"""Messages by NCCL's own functions: what these are told, and when; here a library that notes it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from customized_ops.ring_attention.core.comm.ways import nccl
from customized_ops.ring_attention.core.comm.ways.way import Way, start

Said = list[tuple[Any, ...]]
STREAMS = {"inside": 11, "across": 22}
COMMUNICATORS = {"inside": 111, "across": 222}


class Stream:
    """A stream that notes what it is told."""

    def __init__(self, name: str, said: Said) -> None:
        self.cuda_stream = STREAMS.get(name, 0)
        self._name, self._said = name, said

    def wait_event(self, event: object) -> None:
        self._said.append((self._name, "waits for", event))

    def record_event(self) -> object:
        return f"all of {self._name}"


@pytest.fixture
def said() -> Said:
    return []


@pytest.fixture
def ways(said: Said, monkeypatch: pytest.MonkeyPatch) -> list[Way]:
    """Of rank 2, with rank 3 on its host and 0 and 1 elsewhere."""
    names = iter(STREAMS)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: Stream(next(names), said))
    monkeypatch.setattr(nccl, "_current_stream", lambda _: Stream("current", said))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    note = lambda name: lambda *given: said.append((name, *given)) or 0  # noqa: E731
    functions = (note(name) for name in ("start", "end", "send", "receive"))
    library = nccl.Nccl(*functions, lambda code: b"error %d" % code)
    monkeypatch.setattr(nccl, "nccl", lambda: library)
    made = []
    for name, peers, first in (("inside", {2, 3}, 2), ("across", {0, 1}, 0)):
        backend = SimpleNamespace(_comm_ptr=lambda name=name: COMMUNICATORS[name])
        group: Any = SimpleNamespace(_get_backend=lambda device, backend=backend: backend)
        made.append(Way(group, frozenset(peers), first).direct(torch.device("cuda", 0)))
    return made


def test_messages_of_all_ways_start_at_once_after_what_came_before(
    ways: list[Way], said: Said
) -> None:
    a, b, c = (torch.zeros(n, dtype=torch.bfloat16) for n in (3, 5, 7))
    works = start(ways, 2, {3: [a], 0: [b]}, {1: [c]})
    assert said == [
        ("start",),
        ("inside", "waits for", "all of current"),
        ("send", a.data_ptr(), 6, nccl.UINT8, 1, 111, 11),
        ("across", "waits for", "all of current"),
        ("send", b.data_ptr(), 10, nccl.UINT8, 0, 222, 22),
        ("receive", c.data_ptr(), 14, nccl.UINT8, 1, 222, 22),
        ("end",),
    ]
    said.clear()
    for work in works:
        work.wait()
    assert said == [("current", "waits for", f"all of {name}") for name in STREAMS]


def test_buffers_are_kept_until_someone_has_waited(ways: list[Way]) -> None:
    """After an error nobody waits, and a message may still arrive."""
    inside = ways[0].queue
    assert inside is not None
    message = torch.zeros(3)
    [first] = start(ways, 2, {}, {3: [message]})
    [other] = start(ways, 2, {3: [message]}, {})
    assert [key for key, _ in inside.kept.items()] == [first, other]
    assert all(operations[0][1] is message for operations in inside.kept.values())
    first.wait()
    first.wait()
    assert list(inside.kept) == [other]


@pytest.mark.parametrize("wrong", ["group_start", "send", "group_end"])
def test_an_error_ends_the_group_of_operations(
    wrong: str, ways: list[Way], said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = ways[0].queue
    assert queue is not None
    monkeypatch.setattr(queue, "library", queue.library._replace(**{wrong: lambda *_: 3}))
    with pytest.raises(dist.DistBackendError, match="NCCL: error 3"):
        start(ways, 2, {3: [torch.zeros(3)]}, {})
    assert (("end",) in said) == (wrong == "send")
    assert len(queue.kept) == (wrong != "group_start"), "what was called may be on its way"


def test_without_messages_nothing_is_called(ways: list[Way], said: Said) -> None:
    assert not start(ways, 2, {}, {})
    assert not said


def test_another_device_is_made_the_current_one(
    ways: list[Way], said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = [1]

    @contextmanager
    def device(there: torch.device) -> Iterator[None]:
        said.append(("device", there.index))
        before, current[0] = current[0], there.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    start(ways, 2, {3: [torch.zeros(3)]}, {})
    assert said[:2] == [("device", 0), ("start",)] and current == [1]


def test_a_group_that_was_destroyed(ways: list[Way], said: Said) -> None:
    queue = ways[1].queue
    assert queue is not None
    queue._backend._comm_ptr = lambda: 0
    with pytest.raises(dist.DistBackendError, match="was destroyed"):
        start(ways, 2, {0: [torch.zeros(3)]}, {})
    assert said[-1] == ("end",)


@pytest.mark.parametrize("arrived", [False, True])
def test_messages_of_another_way_are_kept_after_an_error(ways: list[Way], arrived: bool) -> None:
    """They are on their way, and nobody waits for them: they are freed once they have arrived."""
    inside, across = (way.queue for way in ways)
    assert inside is not None and across is not None
    across._backend._comm_ptr = lambda: 0
    message = torch.zeros(3)
    with pytest.raises(dist.DistBackendError, match="was destroyed"):
        start(ways, 2, {0: [message]}, {3: [message]})
    [(queued, [operation])] = inside.kept.items()
    assert operation[1] is message and queued.done == "all of inside"
    queued.done = SimpleNamespace(query=lambda: arrived)
    for way in ways[:1]:
        way.forget()
    assert list(inside.kept) == ([] if arrived else [queued])


@pytest.mark.parametrize("communicator", [None, 0])
def test_a_communicator_that_torch_does_not_tell(
    communicator: int | None, ways: list[Way], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then torch passes the messages."""
    told = {} if communicator is None else {"_comm_ptr": lambda: communicator}
    backend = SimpleNamespace(**told)
    group: Any = SimpleNamespace(_get_backend=lambda device: backend)
    assert Way(group, frozenset({0})).direct(torch.device("cuda", 0)).queue is None


@pytest.mark.parametrize("mismatch", ["no NCCL", "not loaded", "another one", None])
def test_which_library_is_called(mismatch: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only that of torch itself: another one would not know torch's communicators."""

    class Library(SimpleNamespace):
        def __getattr__(self, name: str) -> Any:
            return self.__dict__.setdefault(name, SimpleNamespace())

    def load(name: str, mode: int) -> Library:
        if mismatch == "not loaded":
            raise OSError(name)

        def version(found: Any) -> None:
            found._obj.value = 22809

        return Library(ncclGetVersion=version)

    monkeypatch.setattr(dist, "is_nccl_available", lambda: mismatch != "no NCCL")
    monkeypatch.setattr(ctypes, "PyDLL", load)
    monkeypatch.setattr(ctypes, "CDLL", load)
    theirs = (2, 28, 9) if mismatch != "another one" else (2, 27, 9)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: theirs)
    assert (nccl.nccl.__wrapped__() is None) == (mismatch is not None)
