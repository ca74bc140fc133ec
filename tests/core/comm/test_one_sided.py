"""Ranks that write into one another's memory against ranks that send messages."""

from __future__ import annotations

import gc
import math
import random
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import one_sided_memory
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_sided_memory import InProcessOneSided, SparingOneSided, ThreadMemory
from torch import Tensor

from customized_ops.ring_attention.core.comm import Comm, inprocess
from customized_ops.ring_attention.core.comm.inprocess import run_ranks
from customized_ops.ring_attention.core.comm.one_sided.arena import ALIGNED_BYTES, Arena, Piece
from customized_ops.ring_attention.core.comm.one_sided.one_sided_comm import (
    SPARED_BYTES,
    SPARED_TOKENS,
    OneSidedComm,
)
from customized_ops.ring_attention.core.comm.signals import NO_CALL
from customized_ops.ring_attention.core.comm.transfer_side import ROWS
from customized_ops.ring_attention.core.kernels import (
    KERNELS,
    BackwardOperands,
    ForwardOperands,
    Scoring,
)
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.core.run import forward_pass, rank_pass
from customized_ops.ring_attention.core.run.executor import attention_backward, attention_forward

HEADS, DIM, V_DIM, BATCH = (4, 2), 16, 8, 2
NAMES = ("out", "lse", "dq", "dk", "dv")


@pytest.fixture(scope="module")
def kinds() -> dict[str, Any]:
    """How ranks may be connected."""
    return {
        "messages": inprocess.InProcessComm,
        "one-sided": InProcessOneSided,
        "sparing": SparingOneSided,
    }


def connect(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """Let ranks in this process be connected so."""
    monkeypatch.setattr(inprocess, "InProcessComm", kind)


def passes(
    plan: Plan,
    dtype: torch.dtype,
    times: int = 1,
    begin: Callable[[Comm], None] = lambda comm: None,
    kernel: Any = KERNELS["reference"],
    **options: Any,
) -> list[tuple[list[Tensor], tuple[int, int]]]:
    """Each rank's (out, lse, dq, dk, dv) of each of ``times`` passes, and its counted bytes."""
    mask = plan.mask

    def body(comm: Comm) -> tuple[list[Tensor], tuple[int, int]]:
        begin(comm)
        results = []
        for seed in range(times):
            q, k, v, dout = draw(mask, dtype, seed)
            own = [plan.q_layout.shard(q, comm.rank)]
            own += [plan.k_layout.shard(t, comm.rank) for t in (k, v)]
            own_dout = plan.q_layout.shard(dout, comm.rank)
            scoring = Scoring(0.25)
            out, lse = attention_forward(plan, comm, kernel, ForwardOperands(*own), scoring)
            given = BackwardOperands(own_dout, *own, out, lse)
            grads = attention_backward(plan, comm, kernel, given, scoring, **options)
            results += [out, lse, *grads]
        return results, (comm.counters.sent_bytes, comm.counters.received_bytes)

    return run_ranks(plan.group_size, body)


def draw(
    mask: AttnMask, dtype: torch.dtype, seed: int, heads: tuple[int, int] = HEADS
) -> list[Tensor]:
    """q, k, v, dout, Gaussian."""
    source = torch.Generator().manual_seed(seed)
    (h, g), q_len, k_len = heads, mask.q_len, mask.k_len
    sizes = [(q_len, h, DIM), (k_len, g, DIM), (k_len, g, V_DIM), (q_len, h, V_DIM)]
    return [
        torch.randn((BATCH, *s), dtype=torch.float64, generator=source).to(dtype) for s in sizes
    ]


def assert_alike(one: Any, other: Any) -> None:
    """Every result and every count is the same, to the bit."""
    for rank, ((a, bytes_a), (b, bytes_b)) in enumerate(zip(one, other, strict=True)):
        assert bytes_a == bytes_b, f"rank {rank} counts other bytes"
        for n, (x, y) in enumerate(zip(a, b, strict=True)):
            assert torch.equal(x, y), f"rank {rank}, {NAMES[n % 5]} of pass {n // 5}"


CAUSAL = AttnMask.dense(64, causal=True)
FEW_ROWS = AttnMask.dense(4, 128)
SPLIT = {"heads": HEADS, "assignment": "balanced"}
STRIPED = Layout.striped(64, 4, block=4)
PLANS = {
    "zigzag": make_plan(CAUSAL, Layout.zigzag(64, 2), stages=1, heads=HEADS),
    "gathered": make_plan(CAUSAL, Layout.contiguous(64, 4), stages=0, **SPLIT),
    "staged": make_plan(CAUSAL, Layout.contiguous(64, 4), stages=3, **SPLIT),
    "scattered": make_plan(CAUSAL, STRIPED, stages=1, heads=HEADS, assignment="owner"),
    "teams": make_plan(CAUSAL, Layout.zigzag(64, 4), stages=1, team_size=2, **SPLIT),
    "groups of heads": make_plan(
        CAUSAL, STRIPED, stages=1, heads=HEADS, assignment="balanced", head_groups=2
    ),
    "gathered in groups": make_plan(
        CAUSAL, Layout.contiguous(64, 3), stages=0, heads=HEADS, head_groups=2
    ),
    "rows of several ranks": make_plan(
        FEW_ROWS, Layout.contiguous(4, 4), Layout.contiguous(128, 4), assignment="nearest"
    ),
    "nothing moves": make_plan(AttnMask.varlen([0, 32, 64], causal=True), Layout.contiguous(64, 2)),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16])
def test_results_are_those_of_messages(
    name: str,
    reduce_dtype: torch.dtype | None,
    kinds: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, got = PLANS[name], {}
    for kind, comm in kinds.items():
        connect(monkeypatch, comm)
        got[kind] = passes(plan, torch.float32, times=3, reduce_dtype=reduce_dtype)
    assert_alike(got["messages"], got["one-sided"])
    assert_alike(got["messages"], got["sparing"])


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("heads", "team_size", "ranks"),
    [((6, 3), 2, 4), ((4, 1), 4, 4), ((5, 5), 3, 3), ((6, 2), 4, 4)],
)
@pytest.mark.parametrize("stages", [0, 1])
@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16])
def test_shares_of_any_size(
    heads: tuple[int, int],
    team_size: int,
    ranks: int,
    stages: int,
    reduce_dtype: torch.dtype | None,
    kinds: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks of a team send and receive unlike many heads; one plan may serve other heads too."""
    options = {"heads": heads, "team_size": team_size, "assignment": "balanced"}
    got = {}
    plan = make_plan(CAUSAL, Layout.striped(64, ranks, block=4), stages=stages, **options)

    def body(comm: Comm) -> tuple[list[Tensor], tuple[int, int]]:
        results = []
        for seed, (h, g) in enumerate([heads, (heads[0], heads[0]), heads]):
            q, k, v, dout = draw(CAUSAL, torch.float32, seed, (h, g))
            own = [plan.q_layout.shard(t, comm.rank) for t in (q, k, v)]
            kernel, scoring = KERNELS["reference"], Scoring(0.25)
            out, lse = attention_forward(plan, comm, kernel, ForwardOperands(*own), scoring)
            own_dout = plan.q_layout.shard(dout, comm.rank)
            dlse = torch.full_like(lse, 0.5)
            grads = attention_backward(
                plan,
                comm,
                kernel,
                BackwardOperands(own_dout, *own, out, lse, dlse),
                scoring,
                reduce_dtype=reduce_dtype,
            )
            results += [out, lse, *grads]
        return results, (comm.counters.sent_bytes, comm.counters.received_bytes)

    for kind, comm in kinds.items():
        connect(monkeypatch, comm)
        got[kind] = run_ranks(plan.group_size, body)
    assert_alike(got["messages"], got["one-sided"])
    assert_alike(got["messages"], got["sparing"])


@pytest.mark.thin(3)
@pytest.mark.parametrize("kind", [InProcessOneSided, SparingOneSided])
@pytest.mark.parametrize("name", PLANS)
def test_whoever_is_late(name: str, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that runs ahead never writes over what another still reads."""
    connect(monkeypatch, kind)
    plan = PLANS[name]
    first = passes(plan, torch.float32, times=4)
    for seed in range(3):

        def begin(comm: Any, seed: int = seed) -> None:
            comm.memory.late = random.Random(seed * 10 + comm.rank)

        assert_alike(first, passes(plan, torch.float32, times=4, begin=begin))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.data())
def test_plans_drawn_at_random(data: st.DataObject) -> None:
    """Several plans one after the other over one group: places shrink, grow and are used again."""
    ranks = data.draw(st.sampled_from([2, 3, 4]))
    plans = []
    for _ in range(data.draw(st.integers(1, 3))):
        length = data.draw(st.integers(1, 60))
        layouts = [Layout.zigzag(length, ranks), Layout.contiguous(length, ranks)]
        layouts.append(Layout.striped(length, ranks, block=data.draw(st.integers(1, 5))))
        plans.append(
            make_plan(
                AttnMask.dense(length, causal=data.draw(st.booleans())),
                data.draw(st.sampled_from(layouts)),
                stages=data.draw(st.integers(0, 3)),
                assignment=data.draw(st.sampled_from(["owner", "balanced"])),
                heads=HEADS,
            )
        )

    def body(comm: Comm) -> list[Tensor]:
        results = []
        for n, plan in enumerate([*plans, *plans]):
            q, k, v, dout = draw(plan.mask, torch.float64, n)
            own = [plan.q_layout.shard(t, comm.rank) for t in (q, k, v)]
            kernel, scoring = KERNELS["reference"], Scoring(0.25)
            out, lse = attention_forward(plan, comm, kernel, ForwardOperands(*own), scoring)
            own_dout = plan.q_layout.shard(dout, comm.rank)
            given = BackwardOperands(own_dout, *own, out, lse)
            grads = attention_backward(plan, comm, kernel, given, scoring)
            results += [out, lse, *grads]
        return results

    want = run_ranks(ranks, body)
    for kind in (InProcessOneSided, SparingOneSided):
        with pytest.MonkeyPatch.context() as patch:
            connect(patch, kind)
            got = run_ranks(ranks, body)
        for a, b in zip(want, got, strict=True):
            assert all(map(torch.equal, a, b))


def arenas(
    plan: Plan, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], list[tuple[int, ...]]]:
    """Bytes of the arena that each rank used in a forward and in a backward, and the channels of
    each exchange of rank 0."""
    connect(monkeypatch, kind)
    used: list[int] = []
    channels: list[tuple[int, ...]] = []

    def watch(comm: Any) -> None:
        end, write = comm.end, comm._write

        def ended() -> None:
            used.append(comm.arena_bytes)
            end()

        def writing(ready: Any, source: Any) -> None:
            if comm.rank == 0:
                channels.append(ready.channels)
            write(ready, source)

        monkeypatch.setattr(comm, "end", ended)
        monkeypatch.setattr(comm, "_write", writing)

    passes(plan, torch.float32, begin=watch)
    return used[:: plan.group_size], channels


@pytest.mark.parametrize("name", PLANS)
def test_results_that_come_over_keys_take_no_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the last keys of a backward, that is: no other exchange waits for its peers."""
    plan = PLANS[name]
    written, plain = arenas(plan, InProcessOneSided, monkeypatch)
    sparing, channels = arenas(plan, SparingOneSided, monkeypatch)
    assert all(len(each) == 1 for each in plain)
    assert sum(len(each) > 1 for each in channels) == plan.keys_move
    if plan.keys_move:
        assert sparing[0] == written[0] and sparing[1] < written[1]
    else:
        assert sparing == written
    if name in ("zigzag", "scattered"):  # one stage of keys, and no rows
        assert sparing[1] == sparing[0]


def test_from_how_many_tokens_on_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert OneSidedComm.spared_tokens == SPARED_TOKENS == 16_384
    plan = PLANS["zigzag"]
    written, _ = arenas(plan, InProcessOneSided, monkeypatch)
    most = max(plan.rank(n).stages[-1].kv.tokens for n in range(plan.group_size))  # type: ignore[union-attr]

    class JustEnough(InProcessOneSided):
        spared_tokens = most

    class TooFew(InProcessOneSided):
        spared_tokens = most + 1

    assert arenas(plan, JustEnough, monkeypatch)[0][1] == written[0]
    assert arenas(plan, TooFew, monkeypatch)[0] == written


def test_from_how_many_bytes_on_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert OneSidedComm.spared_bytes == SPARED_BYTES == 64 * 2**20
    written, _ = arenas(PLANS["zigzag"], InProcessOneSided, monkeypatch)
    theirs = written[1] - written[0]

    class JustEnough(InProcessOneSided):
        spared_bytes = theirs

    class TooFew(InProcessOneSided):
        spared_bytes = theirs + 1

    assert arenas(PLANS["zigzag"], JustEnough, monkeypatch)[0][1] == written[0]
    assert arenas(PLANS["zigzag"], TooFew, monkeypatch)[0] == written


def test_what_arrived_is_not_kept(kinds: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the pass that asked for it, once it is not read any more."""
    plan = PLANS["zigzag"]
    connect(monkeypatch, kinds["messages"])
    alive: list[bool] = []

    def watch(comm: Any) -> None:
        start, kept = comm.start, list[weakref.ref[Any]]()

        def starting(send: Any, receive: Any) -> Any:
            kept.extend(weakref.ref(t) for each in receive.values() for t in each)
            return start(send, receive)

        def ended() -> None:
            alive.extend(tensor() is not None for tensor in kept)

        monkeypatch.setattr(comm, "start", starting)
        monkeypatch.setattr(comm, "end", ended)

    passes(plan, torch.float32, begin=watch)
    assert alive and not any(alive)


def test_without_places_it_sends_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layout ops know no pass."""
    connect(monkeypatch, InProcessOneSided)
    plan = PLANS["zigzag"]

    def body(comm: Comm) -> Tensor:
        exchange = plan.rank(comm.rank).stages[1].kv
        assert exchange is not None
        own = plan.k_layout.shard(torch.arange(64.0).view(1, 64, 1, 1), comm.rank)
        (got,) = comm.fetch(exchange, [own], [ROWS]).wait()
        return got.flatten()

    for rank, got in enumerate(run_ranks(2, body)):
        kv = plan.rank(rank).stages[1].kv
        assert kv is not None and np.array_equal(got.numpy(), kv.indices)


def test_tensors_of_another_device_go_by_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those on a CPU, of a group whose memory is that of GPUs."""
    plan = PLANS["zigzag"]
    want = passes(plan, torch.float32)
    connect(monkeypatch, InProcessOneSided)

    def elsewhere(comm: Any) -> None:
        comm.memory.device = torch.device("meta")
        monkeypatch.setattr(comm.memory, "allocate", None)

    for mine, his in zip(passes(plan, torch.float32, begin=elsewhere), want, strict=True):
        assert mine[1] == his[1] and all(map(torch.equal, mine[0], his[0]))


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", [InProcessOneSided, SparingOneSided])
@pytest.mark.parametrize("channels", [1, 2, 3, 8])
def test_exchanges_without_a_channel_go_by_messages(
    channels: int, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each pass the last ones."""
    plan = PLANS["staged"]
    want = passes(plan, torch.float32, times=2)
    connect(monkeypatch, kind)
    monkeypatch.setattr(one_sided_memory, "CHANNELS", channels)
    written: list[int] = []

    def watch(comm: Any) -> None:
        write = comm._write

        def counted(ready: Any, source: Any) -> None:
            written.extend(ready.channels)
            write(ready, source)

        monkeypatch.setattr(comm, "_write", counted)

    for mine, his in zip(passes(plan, torch.float32, 2, watch), want, strict=True):
        assert mine[1] == his[1] and all(map(torch.equal, mine[0], his[0]))
    assert set(written) == set(range(1, channels))


@pytest.mark.parametrize("where", ["in the kernel", "in the merge"])
def test_a_pass_that_failed_is_not_followed_by_another(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its signals are set, and the next pass would wait on a GPU for ever; or its peers go on to
    another pass than the one that is tried again."""
    connect(monkeypatch, InProcessOneSided)
    plan, failed, reference = PLANS["zigzag"], set[int](), KERNELS["reference"]

    def failing(function: Any) -> Any:
        """Fails once on each rank, a thread."""

        def once(*given: Any) -> Any:
            if threading.get_ident() in failed:
                return function(*given)
            failed.add(threading.get_ident())
            raise MemoryError("no memory")

        return once

    kernel: Any = reference
    if where == "in the kernel":
        kernel = SimpleNamespace(forward=failing(reference.forward))
    else:
        result = failing(forward_pass.Accumulator.result)
        monkeypatch.setattr(forward_pass.Accumulator, "result", result)

    def body(comm: Comm) -> None:
        own = [plan.q_layout.shard(t, comm.rank) for t in draw(plan.mask, torch.float32, 0)[:3]]
        for error, text in (
            (MemoryError, "no memory"),
            (RuntimeError, "ended in an error.*make a new process group"),
        ):
            with pytest.raises(error, match=text):
                attention_forward(plan, comm, kernel, ForwardOperands(*own), Scoring(0.25))

    run_ranks(2, body)


# ----------------------------------------------------------------------------- the arena


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


def test_arena_grows_once_and_is_used_again() -> None:
    memory = Counted()
    arena = Arena(memory)  # type: ignore[arg-type]
    sizes = [300, 1000, 0, 256]
    addresses = []
    for n in range(3):
        assert arena.begin() == (n == 1), "what came in pieces becomes one at the second pass"
        addresses.append([arena.take(size)[0].data_ptr() for size in sizes])
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
        captured = weakref.ref(arena.take(256)[0].untyped_storage())
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
        captured += [weakref.ref(arena.take(size)[0].untyped_storage()) for size in sizes]
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
