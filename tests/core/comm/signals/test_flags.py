"""Flags between ranks, and what their kernels tell the host: of two ranks on one GPU."""

from __future__ import annotations

import pytest
import torch

from customized_ops.ring_attention.core.comm.signals import record as of

pytestmark = pytest.mark.gpu

RANKS, CALL, OTHER = 2, -(1 << 62) + 5, 7


@pytest.fixture
def flags():
    from customized_ops.ring_attention.core.comm.signals.flags import FLAG_BYTES, Flags, flags_bytes

    words = flags_bytes(RANKS) // FLAG_BYTES
    memory = [torch.zeros(words, dtype=torch.int64, device="cuda") for _ in range(RANKS)]
    return memory, [Flags(memory, rank, memory[0].device) for rank in range(RANKS)]


def test_flags_are_set_and_cleared(flags) -> None:
    """By the sender's channel and place; any number of times, and in an order of streams."""
    memory, (first, second) = flags
    for channel in (0, 3, 255):
        first.put([1], channel, CALL)
        torch.cuda.synchronize()
        (at,) = memory[1].nonzero()[:, 0].tolist()
        assert (at, memory[1][at].item()) == (channel * RANKS, CALL) and not memory[0].any()
        second.wait([0], channel, CALL)
        torch.cuda.synchronize()
        assert not memory[1].any()
    waits = torch.cuda.Stream()
    for _ in range(50):
        with torch.cuda.stream(waits):
            second.wait([0], 1, CALL)
            second.put([0], 2, OTHER)
        first.put([1], 1, CALL)
        first.wait([1], 2, OTHER)
    torch.cuda.synchronize()
    assert not any(t.any() for t in memory)
    assert not first.record.any() and not second.record.any(), "nobody has waited for long"


def test_a_long_wait_is_told_and_then_forgotten(flags) -> None:
    _, (first, second) = flags
    waits = torch.cuda.Stream()
    with torch.cuda.stream(waits):
        second.wait([0], 1, CALL)
    at = of.SLOTS
    while not second.record[at + of.STATUS]:
        pass
    assert [second.record[at + n] for n in (of.STATUS, of.CALL)] == [of.WAITS, CALL]
    first.put([1], 1, CALL)
    torch.cuda.synchronize()
    assert second.record[at + of.STATUS] == of.NOTHING
    second.mark(17)
    torch.cuda.synchronize()
    assert second.record[of.ENDED] == 17
