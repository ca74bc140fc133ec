"""Passes whose addresses come again are launched as they were captured.

On a CPU a stand-in is launched: the steps over tensors that lie where the captured ones did."""

from __future__ import annotations

import ctypes
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from one_sided_memory import InProcessOneSided
from replay_cases import HEADS, PLANS, draw, kernel
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from customized_ops.ring_attention.core import tape
from customized_ops.ring_attention.core.comm import Comm, inprocess
from customized_ops.ring_attention.core.comm.inprocess import run_ranks
from customized_ops.ring_attention.core.kernels import BackwardOperands, ForwardOperands, Scoring
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.core.run import side_stream
from customized_ops.ring_attention.core.run.executor import attention_backward, attention_forward
from customized_ops.ring_attention.core.run.replays import graphs, replay, seen_before
from customized_ops.ring_attention.core.tape import Tape, recorder

SEEN, TIMES = 2, 16


def lying_there(t: Tensor | None) -> Tensor | None:
    """A tensor over the memory of another, which it does not keep."""
    if t is None or not t.numel():
        return t
    memory = (ctypes.c_char * spanned_bytes(t)).from_address(t.data_ptr())
    return torch.frombuffer(memory, dtype=t.dtype).as_strided(t.shape, t.stride())


def spanned_bytes(t: Tensor) -> int:
    return t.element_size() * (
        1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    )


class Allocator:
    """Gives memory that was freed to the next tensor of its thread that is like the last one there,
    as a GPU's does; that of a CPU is anywhere."""

    def __init__(self) -> None:
        self._blocks: dict[Any, list[tuple[Tensor, StorageWeakRef]]] = {}

    def making(self, t: Tensor) -> tuple[Any, tuple[Any, ...]]:
        """As that of tapes."""
        return self._make, (tuple(t.shape), t.stride(), t.dtype)

    def _make(self, shape: Any, strides: Any, dtype: torch.dtype) -> Tensor | None:
        blocks = self._blocks.setdefault((threading.get_ident(), shape, strides, dtype), [])
        free = [n for n, (_, user) in enumerate(blocks) if user.expired()]
        at = free[0] if free else len(blocks)
        block = blocks[at][0] if free else torch.empty_strided(shape, strides, dtype=dtype)
        made = lying_there(block)
        if made is not None and made.numel():
            blocks[at : at + 1] = [(block, StorageWeakRef(made.untyped_storage()))]
        return made


class Captures:
    """Makes stand-ins, and counts how often one was made and launched."""

    def __init__(self) -> None:
        self.asked, self.made, self.launched, self.without_memory = 0, 0, 0, 0

    def __call__(self, tape: Tape, given: graphs.Given) -> graphs.Launch | None:
        self.asked += 1
        if self.asked <= self.without_memory:
            return None
        there = [lying_there(t) for t in given]
        self.made += 1

        def launch() -> None:
            self.launched += 1
            tape.run(there)

        return launch


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    made = Captures()
    monkeypatch.setattr(recorder, "making", Allocator().making)
    monkeypatch.setattr(replay, "of_tape", lambda tape, *_, **__: graphs.Graphs(tape, made))
    monkeypatch.setattr(seen_before, "SEEN_BEFORE", SEEN)
    monkeypatch.setattr(replay, "_of_pairs", seen_before.SeenBefore())
    monkeypatch.setattr(replay, "_of_plans", seen_before.SeenBefore())
    return made


def steps(plan: Plan, attends: Any, dtype: torch.dtype) -> list[list[Tensor]]:
    """Each rank's results of several steps of two layers, whose tensors lie where they lay."""
    layouts = plan.q_layout, plan.k_layout, plan.k_layout, plan.q_layout

    def body(comm: Comm) -> list[Tensor]:
        def shards(seed: int) -> list[Tensor]:
            drawn = zip(layouts, draw(plan.mask, seed, dtype), strict=True)
            return [layout.shard(t, comm.rank) for layout, t in drawn]

        scoring, found = Scoring(0.25), list[Tensor]()
        layers = [[t.clone() for t in shards(layer)] for layer in range(2)]
        for n in range(TIMES):
            for layer, tensors in enumerate(layers):
                for mine, new in zip(tensors, shards(2 * n + layer), strict=True):
                    mine.copy_(new)
            results = [
                attention_forward(plan, comm, attends, ForwardOperands(q, k, v), scoring)
                for q, k, v, _ in layers
            ]
            for (q, k, v, dout), (out, lse) in zip(layers, results, strict=True):
                given = BackwardOperands(dout, q, k, v, out, lse)
                grads = attention_backward(plan, comm, attends, given, scoring)
                found += [t.clone() for t in (out, lse, *grads)]
        return found

    return run_ranks(plan.group_size, body)


@pytest.mark.thin(8)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", PLANS)
def test_graphs_do_what_passes_do(
    name: str, dtype: torch.dtype, captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inprocess, "InProcessComm", InProcessOneSided)
    want = steps(PLANS[name], kernel(recorded=False), dtype)
    assert not captures.made
    got = steps(PLANS[name], kernel(), dtype)
    for rank, (mine, his) in enumerate(zip(got, want, strict=True)):
        for n, (a, b) in enumerate(zip(mine, his, strict=True)):
            assert torch.equal(a, b), f"rank {rank}, result {n % 5} of call {n // 5}"
    assert captures.launched


def test_passes_in_which_nothing_moves_have_graphs_too(captures: Captures) -> None:
    mask = AttnMask.from_slices([(16, 32, 0, 32, -64, 0), (32, 48, 32, 64, -64, 64)], 64, 64)
    plan = make_plan(mask, Layout.contiguous(64, 2), heads=HEADS, assignment="owner")
    got, want = (steps(plan, kernel(recorded=r), torch.float64) for r in (True, False))
    for mine, his in zip(got, want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, his, strict=True))
    assert captures.launched


def doubled() -> tuple[Tape, Tensor]:
    """A tape of x to 2 x and its x."""
    x = torch.arange(4.0)

    def function() -> tuple[Tensor]:
        made = tape.allocate(torch.empty_like, x)
        tape.launch(Tensor.copy_, made, x)
        tape.launch(Tensor.add_, made, x)
        return (made,)

    made = tape.record(function, [x])[1]
    assert made is not None
    return made, x


def test_results_that_are_not_made_for_it_have_no_graph() -> None:
    """Nor those that are made of a tensor which all calls share, and the pass may write."""
    x, shared = torch.ones(3), torch.zeros(3)

    def write(t: Tensor) -> None:
        shared.copy_(t)

    def written() -> tuple[Tensor]:
        tape.launch(write, x)
        return (tape.computed(torch.add, shared, 1),)

    more = lambda: (tape.computed(torch.add, x, 1),)  # noqa: E731
    for function in (lambda: (x.view(3),), more, lambda: (x,), written):
        made = tape.record(function, [x])[1]
        assert made is not None and made.apart() is None
        shared.zero_()
        (got,) = graphs.Graphs(made, Captures()).run([x])
        assert torch.equal(got, function()[0])


def test_a_view_of_a_new_tensor_is_made_with_it(captures: Captures) -> None:
    x = torch.arange(6.0)

    def function() -> tuple[Tensor, ...]:
        wide = tape.allocate(torch.zeros, 2, 6)
        tape.launch(Tensor.copy_, wide[0], x)
        return wide[0, 2:], wide[1]

    made = tape.record(function, [x])[1]
    assert made is not None and made.apart() is not None
    with_graphs = graphs.Graphs(made, captures)
    for n in range(12):
        x.fill_(n)
        assert [t.tolist() for t in with_graphs.run([x])] == [[n] * 4, [0] * 6]
    assert captures.launched


def test_graphs_are_few(captures: Captures, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses that never come again leave nothing behind, and those that do are found; graphs of
    addresses that come no more make room."""
    monkeypatch.setattr(graphs, "MOST_OF_TAPE", 8)
    monkeypatch.setattr(graphs, "PATIENCE", 64)
    made, x = doubled()
    many, kept, held = graphs.Graphs(made, captures), list[Tensor](), list[list[Tensor]]()
    for n in range(100):
        given = x + n
        kept.append(many.run([given])[0])  # so that no address comes again
        assert torch.equal(kept[-1], 2 * given) and len(many._of_addresses) <= 8
    assert not captures.made
    kept.clear()
    for layers in (12, 6, 8):  # the allocator has other places for each
        places = [x + n for n in range(layers)]
        for _ in range(40):
            before = captures.launched
            for given in places:
                assert torch.equal(many.run([given])[0], 2 * given)
        assert len(many._of_addresses) <= 8
        assert captures.launched - before >= min(layers, 8) - 2
        held.append(places)


def test_what_cannot_be_captured_is_a_tape(captures: Captures) -> None:
    made, x = doubled()

    def refusing(tape: Tape, given: graphs.Given) -> graphs.Launch:
        captures.asked += 1
        raise KeyError("operation not permitted when stream is capturing")

    tried = graphs.Graphs(made, refusing)
    with pytest.warns(UserWarning, match="are not made CUDA graphs: 'operation not permitted"):
        for _ in range(8):
            assert torch.equal(tried.run([x])[0], 2 * x)
    assert captures.asked == 1


def test_without_memory_for_graphs_there_are_tapes(
    captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is not asked for in each pass."""
    monkeypatch.setattr(graphs, "PATIENCE", 5)
    made, x = doubled()
    captures.without_memory = 2
    tried = graphs.Graphs(made, captures)
    for n in range(40):
        given = x.fill_(n)
        assert torch.equal(tried.run([given])[0], 2 * given)
    assert captures.asked == 3 and captures.made == 1 and captures.launched == 16


@pytest.mark.gpu
@pytest.mark.parametrize("failing", [False, True])
def test_a_gpu_s_graphs(failing: bool) -> None:
    """Over two streams; torch goes on after a capture that fails, and there are no more."""
    device = torch.device("cuda", torch.cuda.current_device())
    caller = torch.cuda.Stream(device)  # whose graphs may fail
    x = torch.arange(1 << 20, dtype=torch.float32, device=device)

    def function() -> tuple[Tensor]:
        streams = side_stream.SideStream(device, two=True)
        made = tape.allocate(x.new_empty, 1 << 20)
        streams.fork()
        with streams.second():
            half = tape.computed(torch.mul, x[: 1 << 19], 2)
            if failing:
                tape.launch(torch.cuda.synchronize)
            tape.launch(Tensor.copy_, made[: 1 << 19], half)
        tape.launch(Tensor.copy_, made[1 << 19 :], x[1 << 19 :])
        tape.launch(Tensor.mul_, made[1 << 19 :], 2)
        streams.join()
        return (made,)

    caller.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(caller):
        recorded = tape.record(function, [x])[1]
        assert recorded is not None
        passes = graphs.of_tape(recorded, [x])
        assert isinstance(passes, graphs.Graphs)
        with pytest.warns(UserWarning, match="not made CUDA graphs") if failing else nullcontext():
            for n in range(12):
                x.fill_(n)
                (got,) = passes.run([x])
                assert bool((got == 2 * n).all())
                del got
        assert torch.randn(4, device=device).isfinite().all()
        made = [known.launch for known in passes._of_addresses.values()]
        assert any(made) == (not failing)
        again = graphs.of_tape(recorded, [x])
        assert isinstance(again, graphs.Graphs)
        for n in range(24):
            if n % 8 == 7:
                torch.cuda.empty_cache()
            assert bool((again.run([x])[0] == 2 * x).all())
