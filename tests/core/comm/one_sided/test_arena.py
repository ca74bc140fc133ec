"""The memory that a rank's peers write to: how it grows, and what graphs keep of it."""

from __future__ import annotations

import gc
import math
import random
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from one_sided_memory import InProcessOneSided, ThreadMemory

from customized_ops.ring_attention.core.comm import inprocess
from customized_ops.ring_attention.core.comm.one_sided.arena import (
    ALIGNED_BYTES,
    Arena,
    Piece,
    Place,
)
from customized_ops.ring_attention.core.comm.signals import NO_CALL
from customized_ops.ring_attention.core.kernels import KERNELS
from customized_ops.ring_attention.core.run import rank_pass

from .passes import PLANS, connect, passes


class Counted:
    """Memory of two ranks that counts what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.in_graph = False

    def capturing(self) -> bool:
        """As told."""
        return self.in_graph

    def allocate(self, n_bytes: int) -> Piece:
        """Two tensors."""
        self.asked.append(n_bytes)
        return Piece([torch.zeros(n_bytes, dtype=torch.uint8) for _ in range(2)], None)


def _memory(place: Place) -> torch.Tensor:
    return place.tensors(0, [[place.n_bytes]], [torch.uint8])[0]


def test_arena_grows_once_and_is_used_again() -> None:
    memory = Counted()
    arena = Arena(memory)  # type: ignore[arg-type]
    sizes = [300, 1000, 0, 256]
    addresses = []
    for n in range(3):
        assert arena.begin() == (n == 1), "what came in pieces becomes one at the second pass"
        addresses.append([_memory(arena.take(size)).data_ptr() for size in sizes])
        assert len(set(addresses[-1])) == len(sizes)
    # The third piece has room for the fourth size too: an arena grows by half of what it has.
    pieces = [512, 1024, 3 * ALIGNED_BYTES]
    assert memory.asked == [*pieces, sum(pieces)] and addresses[1] == addresses[2]


@pytest.mark.parametrize("larger", [1.001, 1.01, 1.1])
def test_an_arena_grows_rarely_although_each_batch_needs_more(larger: float) -> None:
    memory = Counted()
    arena = Arena(memory)  # type: ignore[arg-type]
    need, steps = 1e6, 0
    while need < 30e6:
        arena.begin()
        for part in (0.7, 0.3):
            arena.take(int(part * need))
        need, steps = larger * need, steps + 1
    # From 1 to 30 by halves, each a piece more and then one for all; the first step has two pieces.
    growths = math.ceil(math.log(30) / math.log(1.5))
    assert len(memory.asked) <= min(2 * growths + 4, 2 * steps)
    arena.begin()
    assert sum(len(piece) for piece in arena._pieces) <= 1.6 * 30e6


def test_batches_of_any_lengths_make_no_memory_once_the_longest_was_there() -> None:
    memory, draw = Counted(), np.random.default_rng(0)
    arena = Arena(memory)  # type: ignore[arg-type]
    needs = draw.uniform(0.2, 1.0, (300, 6)) * 1e6
    asked = []
    for need in [*needs, *needs[::-1]]:
        arena.begin()
        for part in need:
            arena.take(int(part))
        asked.append(len(memory.asked))
    assert asked[-1] == asked[299], "each has been there"
    assert asked[-1] <= 12 and asked[20] == asked[-1], "and after a few others nothing grows"


def test_what_a_graph_uses_is_kept() -> None:
    """A graph that is replayed reads and writes where it did when it was captured."""
    memory = Counted()
    arena = Arena(memory)  # type: ignore[arg-type]
    arena.begin()
    arena.take(256)
    memory.in_graph = True
    for _ in range(2):
        arena.begin()
        captured = weakref.ref(_memory(arena.take(256)).untyped_storage())
    memory.in_graph = False
    arena.begin()
    arena.take(256), arena.take(512)
    assert arena.begin(), "two pieces become one, without the first"
    gc.collect()
    assert captured() is not None
    memory.in_graph = True
    arena.begin()
    arena.take(256), arena.take(512), arena.take(1024)
    assert not arena.begin(), "no memory is made while a graph is captured"


def test_each_graph_keeps_what_it_uses() -> None:
    """One that is captured after a larger pass uses a piece that the first one does not."""
    memory = Counted()
    arena = Arena(memory)  # type: ignore[arg-type]
    arena.begin()
    arena.take(256)
    captured = []
    for sizes in ((256,), (256, 512)):
        memory.in_graph = False
        arena.begin()
        for size in sizes:
            arena.take(size)
        memory.in_graph = True
        arena.begin()
        captured += [weakref.ref(_memory(arena.take(size)).untyped_storage()) for size in sizes]
    memory.in_graph = False
    assert arena.begin(), "two pieces become one"
    gc.collect()
    assert all(storage() is not None for storage in captured)


def test_late_memory_is_late() -> None:
    """The tests above wait where they say so."""
    memory = ThreadMemory(inprocess.World(1), 0)
    memory.late = random.Random(0)
    state = memory.late.getstate()
    memory.signal([0], 0, NO_CALL)
    assert memory.late.getstate() != state


class Weighing:
    """The reference kernel; notes at each backward how many gradients of keys, of this rank's calls
    before, are still there."""

    forward = staticmethod(KERNELS["reference"].forward)

    def __init__(self) -> None:
        self._rank = threading.local()
        self.there: list[list[int]] = []

    def backward(self, *args: Any, **options: Any) -> Any:
        """See :class:`~.protocol.Kernel`."""
        if not hasattr(self._rank, "made"):
            self._rank.made, self._rank.there = [], []
            self.there.append(self._rank.there)
        self._rank.there.append(sum(grad() is not None for grad in self._rank.made))
        grads = KERNELS["reference"].backward(*args, **options)
        self._rank.made += [weakref.ref(grad) for grad in grads[1:]]
        return grads


@pytest.mark.parametrize("last", [False, True])
def test_what_lies_beside_the_call_made_last(last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """dk and dv of the rank's own keys, but not of others: those are on their way home."""
    monkeypatch.setattr(rank_pass.RankPass, "own_last", lambda *given: last)
    connect(monkeypatch, InProcessOneSided)
    kernel = Weighing()
    passes(PLANS["zigzag"], torch.float64, kernel=kernel)
    assert kernel.there == [[0, 0 if last else 2]] * PLANS["zigzag"].group_size
