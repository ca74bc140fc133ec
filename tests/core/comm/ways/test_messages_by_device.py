"""Which group carries a message: GPUs' have one of their own, and a group may have CPUs too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from customized_ops.ring_attention.core.comm import dist_comm
from customized_ops.ring_attention.core.comm.dist_comm import DistComm
from customized_ops.ring_attention.core.comm.signals import stamps
from customized_ops.ring_attention.core.comm.ways.way import Way

START, END = -1, -2  # of messages that go together


def _group(name: str, sent: list[tuple[str, int]]) -> Any:
    """A group that notes to whom messages go; those of CPUs do not go together."""

    def note(messages: list[torch.Tensor], place: int, tag: int) -> str:
        sent.append((name, place))
        return "a message"

    return SimpleNamespace(
        send=note,
        recv=note,
        _get_backend=lambda device: SimpleNamespace(supports_coalescing=device.type != "cpu"),
        _start_coalescing=lambda device: sent.append((name, START)),
        _end_coalescing=lambda device: sent.append((name, END)),
    )


@pytest.mark.parametrize(
    ("device", "wanted"),
    [
        ("cpu", [("the caller's", peer) for peer in (0, 1, 2) * 2]),
        (
            "meta",
            [("near", place) for place in (START, 0, 0, END)]
            + [("far", place) for place in (START, 0, 1, 0, 1, END)],
        ),
    ],
)
def test_messages_go_over_a_group_that_has_their_device(
    device: str, wanted: list[tuple[str, int]]
) -> None:
    """ "meta" stands for any device but the CPU. Those inside a host, whose group starts with its
    first rank, do not wait for others."""
    sent: list[tuple[str, int]] = []
    groups = {name: _group(name, sent) for name in ("the caller's", "near", "far")}
    comm: Any = object.__new__(DistComm)
    comm.rank, comm.size = 3, 4
    comm._patience = comm._stamps = comm._device = None
    comm._of_cpus = [Way(groups["the caller's"], frozenset(range(4)))]
    near, far = Way(groups["near"], frozenset({2, 3}), 2), Way(groups["far"], frozenset({0, 1}))
    comm._of_gpus = [near, far]
    messages = {peer: [torch.empty(3, device=device)] for peer in (1, 0, 2)}
    comm.start(messages, messages)
    assert sent == wanted


@pytest.mark.parametrize(
    ("ranks", "peer", "told"),
    [(2, None, ""), (2, "ImportError: no triton", "no triton"), (64, None, "64 ranks; flags are")],
)
def test_gpus_that_cannot_compare_passes_send_them_all_the_same(
    ranks: int, peer: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a group, or none: else some would send a number that others do not expect. More ranks
    than flags are for still watch that passes end."""
    comm: Any = object.__new__(DistComm)
    comm.rank, comm.size, comm.name = 0, ranks, "the group"
    comm._group, comm._patience = None, object()
    comm.all_gather_object = lambda problem: [problem, peer]
    monkeypatch.setattr(dist_comm, "Stamps", lambda *given: "stamps")
    if not told:
        assert comm._made_stamps(torch.device("cpu"), print) == "stamps"
        return
    with pytest.warns(UserWarning, match=f"GPUs of the group 'the group' do not compare .*{told}"):
        assert comm._made_stamps(torch.device("cpu"), print) == ("stamps" if ranks > 63 else None)


@pytest.mark.parametrize("ranks", [63, 64])
def test_ranks_that_flags_are_for_send_stamps(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others begin and end passes all the same, so that their host sees one that does not end."""
    made: list[tuple[int, int]] = []
    marked: list[int] = []
    flags = SimpleNamespace(record=None, mark=marked.append)
    monkeypatch.setattr(stamps, "Flags", lambda of, rank, _: made.append((len(of), rank)) or flags)
    watch = SimpleNamespace(name=lambda *_: None, begin=lambda call: 1, check=lambda what: None)
    monkeypatch.setattr(stamps, "Watch", lambda *_: watch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    nothing: Any = None
    found = stamps.Stamps(62, ranks, torch.device("cpu"), nothing, nothing)
    found.begin(7, "a pass")
    message = {5: [torch.zeros(3)]}
    send, receive, stamped = found.add_to(message, message)
    found.end()
    assert made == [(63, 62) if ranks == 63 else (1, 0)] and marked == [1]
    assert (len(send[5]), len(receive[5]), stamped) == ((2, 2, [5]) if ranks == 63 else (1, 1, []))
