"""Jobs for GPUs whose ranks write into one another's memory; see ``ranks.Pool``.

A job returns what is wrong on its rank, as text, and goes on: a rank that stops leaves the others
waiting. Ranks do not compare what they call (``SEQSHARD_CHECK``), for that would keep them in step.
``rows`` are groups side by side; each rank works in its own.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from op_cases import Case
from rank_groups import Groups, Rows, in_their_own_time, place_in
from torch import Tensor

from customized_ops.ring_attention.core.comm.comm_groups import comm_by_name
from customized_ops.ring_attention.core.comm.one_sided.one_sided_comm import OneSidedComm
from customized_ops.ring_attention.core.comm.rank_group import RankGroup
from customized_ops.ring_attention.core.cost import H200
from customized_ops.ring_attention.core.run.replays import graphs, replay, seen_before

NAMES = ("out", "lse", "dq", "dk", "dv")
LATE_SECONDS = 0.3
SPARING = "sparing"  # purpose of groups where results come over keys that were read, however few


def group_of(kind: str, rows: Rows, purpose: str = "") -> dist.ProcessGroup:
    """This rank's group; another for each purpose."""
    place = place_in(Groups(rows, kind, purpose))
    assert place is not None
    comm = comm_by_name(place.group.group_name)
    # What plans are chosen by, so that both kinds of group run the same ones, over hosts too.
    # Heads of 64, half of those that shards here are long enough for.
    costs = replace(H200, topology=comm.costs.topology, held_shards=comm.costs.held_shards)
    comm.costs = replace(costs, call_seconds=H200.call_seconds / 2)
    if SPARING in purpose:
        assert isinstance(comm, OneSidedComm)
    if isinstance(comm, OneSidedComm):  # over keys always or never, however many ranks there are
        comm.spared_tokens = sys.maxsize
        comm.spared_bytes = 0 if SPARING in purpose else sys.maxsize
    return place.group


def sparing_alone(group: dist.ProcessGroup, purpose: str) -> list[str]:
    """Whether results have come over keys, where they should and only there."""
    comm: Any = comm_by_name(group.group_name)
    ready = [each for known in comm._placement._placed.values() for each in known.values()]
    over = any(len(each.channels) > 1 for each in ready)
    return [] if over == (SPARING in purpose) else [f"{purpose}: results over keys: {over}"]


def drawn(case: Case, rows: Rows, seed: int) -> tuple[list[Tensor], Tensor]:
    """This rank's q, k, v and the gradient of its out; each row of ranks has its own."""
    source = torch.Generator(case.device).manual_seed(1000 * seed + dist.get_rank())
    group = group_of("symmetric", rows)
    rank, ranks = group.rank(), group.size()
    lead = () if case.packed else (case.batch,)
    q_layout, k_layout = case.layouts(ranks)
    (h, g), (d, e) = case.heads, case.dims

    def made(tokens: int, heads: int, dim: int) -> Tensor:
        shape = (*lead, tokens, heads, dim)
        return torch.randn(shape, generator=source, device=case.device, dtype=case.dtype)

    here, keys = q_layout.sizes[rank], k_layout.sizes[rank]
    q, k, v = made(here, h, d), made(keys, g, d), made(keys, g, e)
    if case.fused:
        q, k, v = torch.cat([q, k, v], -2).split([h, g, g], -2)
        assert not k.is_contiguous()
    return [t.detach().requires_grad_() for t in (q, k, v)], made(here, h, e)


def attend(
    case: Case, group: dist.ProcessGroup, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's rows."""
    layout = case.layout_of(group.size())
    return case.call(q, k, v, process_group=group, layout=layout, deterministic=True)


def step(
    case: Case, group: dist.ProcessGroup, leaves: Sequence[Tensor], dout: Tensor
) -> list[Tensor]:
    """out, lse, dq, dk, dv; nothing of autograd's is kept."""
    out, lse = attend(case, group, *leaves)
    grads = torch.autograd.grad(out, leaves, dout)
    return [out.detach(), lse.detach(), *grads]


def differing(what: Any, got: Sequence[Tensor], want: Sequence[Tensor]) -> list[str]:
    """Which results are not the same bit for bit, or are nothing."""
    wrong = []
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        name = f"{what}: {NAMES[n] if n < len(NAMES) else n}"
        if not torch.equal(a, b):
            wrong.append(f"{name} differs by {(a.double() - b.double()).abs().max().item()}")
        if not b.any():
            wrong.append(f"{name} is all zeros")
    return wrong


@in_their_own_time
def against_messages(cases: dict[str, Case], rows: Rows) -> list[str]:
    """Every case over all kinds of group, in turn, so that plans follow one another."""
    wrong = []
    for seed in range(2):
        for name, case in cases.items():
            given = drawn(case, rows, seed)
            want = step(case, group_of("nccl", rows), *given)
            for purpose in ("", SPARING):
                got = step(case, group_of("symmetric", rows, purpose), *given)
                wrong += differing(f"{name}, {seed} {purpose}", got, want)
    for purpose in ("", SPARING):
        wrong += sparing_alone(group_of("symmetric", rows, purpose), purpose)
    return wrong


@in_their_own_time
def captured(case: Case, rows: Rows, purpose: str = "") -> list[str]:
    """A step in a CUDA graph, replayed on new inputs, each time beside an eager one."""
    group = group_of("symmetric", rows, f"captured {purpose}")
    leaves, dout = drawn(case, rows, 0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(case, group, leaves, dout)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Of this thread only: NCCL's own thread may look at what is long done meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = step(case, group, leaves, dout)
    wrong = []
    for seed in (1, 2, 3):
        new_leaves, new_dout = drawn(case, rows, seed)
        with torch.no_grad():
            for static, new in zip([*leaves, dout], [*new_leaves, new_dout], strict=True):
                static.copy_(new)
        graph.replay()
        replayed = [t.clone() for t in results]
        wrong += differing(f"replay {seed}", replayed, step(case, group, new_leaves, new_dout))
    torch.cuda.synchronize()
    graph.reset()
    return wrong + sparing_alone(group, purpose)


@in_their_own_time
def without_waiting(cases: dict[str, Case], rows: Rows) -> list[str]:
    """Repeated steps in which torch refuses whatever makes the host wait for the GPU."""
    group = group_of("symmetric", rows)
    given = {name: drawn(case, rows, 0) for name, case in cases.items()}
    for _ in range(2):
        for name, case in cases.items():
            step(case, group, *given[name])
    probe = torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for name, case in cases.items():
            for _ in range(2):
                step(case, group, *given[name])
        try:
            probe.item()
        except RuntimeError:
            return []
        return ["a wait was not noticed"]
    finally:
        torch.cuda.set_sync_debug_mode("default")


Held = tuple[int, tuple[tuple[int, int], ...]]


@in_their_own_time
def memory_of_steps(
    case: Case, rows: Rows, layers: Sequence[int], purpose: str = "memory of steps"
) -> list[tuple[int, Held]]:
    """Bytes allocated, and what the arena holds, after each of some steps of so many layers."""
    gc.collect()  # what earlier jobs left behind must not go meanwhile
    group = group_of("symmetric", rows, purpose)
    leaves, dout = drawn(case, rows, 0)
    after = []
    for count in layers:
        outs = [attend(case, group, *leaves)[0] for _ in range(count)]
        grads = torch.autograd.grad(outs, leaves, [dout] * count)
        del outs, grads
        torch.cuda.synchronize()
        time.sleep(LATE_SECONDS)  # until NCCL's own thread has let go of what it was given
        after.append((torch.cuda.memory_allocated(), _held(group)))
    return after


@in_their_own_time
def memory_of_plans(
    case: Case, rows: Rows, lengths: Sequence[int], rounds: int
) -> list[list[Held]]:
    """What the arena holds after steps of each length, round by round."""
    group = group_of("symmetric", rows, "memory of plans")
    sizes = [replace(case, length=length) for length in lengths]
    given = [drawn(each, rows, 0) for each in sizes]
    after: list[list[Held]] = []
    for _ in range(rounds):
        after.append([])
        for each, (leaves, dout) in zip(sizes, given, strict=True):
            step(each, group, leaves, dout)
            after[-1].append(_held(group))
    return after


def _held(group: dist.ProcessGroup) -> Held:
    """The arena's generation, and address and bytes of its pieces here."""
    arena: Any = comm_by_name(group.group_name)._arena  # type: ignore[attr-defined]
    here = group.rank()
    pieces = tuple((piece.of_ranks[here].data_ptr(), len(piece)) for piece in arena._pieces)
    return arena.at[0], pieces


@in_their_own_time
def one_late(case: Case, rows: Rows, steps: int, purpose: str = "") -> list[str]:
    """Steps at which one rank after the other comes late, against steps at which none does."""
    group = group_of("symmetric", rows, purpose)
    given = [drawn(case, rows, seed) for seed in range(steps)]

    def all_steps(late: bool) -> list[list[Tensor]]:
        results = []
        for n, (leaves, dout) in enumerate(given):
            if late and n % group.size() == group.rank():
                time.sleep(LATE_SECONDS)
            results.append(step(case, group, leaves, dout))
        return results

    wanted, got = all_steps(False), all_steps(True)
    wrong = sparing_alone(group, purpose)
    for n in range(steps):
        wrong += differing(f"{case.op}, step {n}", got[n], wanted[n])
    return wrong


@in_their_own_time
def replayed(case: Case, rows: Rows, purpose: str = "", kind: str = "symmetric") -> list[str]:
    """Steps from tapes and then, where ranks write to one another, from CUDA graphs, each beside
    one that is neither, of which it has all bits; one rank after the other comes late."""
    group = group_of(kind, rows, purpose)
    leaves, dout = drawn(case, rows, 0)
    launched: list[int] = []
    of_tape, whole = RankGroup.replay, graphs.Studio.capture

    def run(*given: Any) -> Any:
        launched.extend([1] * (kind != "symmetric"))
        return of_tape(*given)

    def counted(*given: Any) -> Any:
        graph = whole(*given)
        return graph and (lambda: launched.append(1) or graph())

    wrong = []
    with (
        mock.patch.dict(os.environ, {replay.CHOICE: "1"}),
        mock.patch.object(graphs.Studio, "capture", counted),
        mock.patch.object(RankGroup, "replay", run),
    ):
        for n in range(seen_before.SEEN_BEFORE + graphs.BEFORE + 20):
            new_leaves, new_dout = drawn(case, rows, n)
            with torch.no_grad():
                for mine, new in zip([*leaves, dout], [*new_leaves, new_dout], strict=True):
                    mine.copy_(new)
            del new_leaves, new_dout
            with replay.replay(False):
                want = [t.clone() for t in step(case, group, leaves, dout)]
            if n % group.size() == group.rank():
                time.sleep(LATE_SECONDS)
            wrong += differing(f"step {n}", step(case, group, leaves, dout), want)
            del want  # so that the next step finds its memory again
    if len(launched) < 4:  # two passes of some steps
        wrong.append(f"passes were replayed {len(launched)} times")
    return wrong + (sparing_alone(group, purpose) if kind == "symmetric" else [])


@in_their_own_time
def layer_on_layer(case: Case, rows: Rows) -> list[str]:
    """What one call returns is the next one's q; their backward passes follow one another too."""
    (q, k, v), _ = drawn(case, rows, 0)
    (_, next_k, next_v), dout = drawn(case, rows, 1)
    leaves = [q, k, v, next_k, next_v]
    results = []
    for kind in ("symmetric", "nccl"):
        between, _ = attend(case, group_of(kind, rows), q, k, v)
        out, lse = attend(case, group_of(kind, rows), between, next_k, next_v)
        grads = torch.autograd.grad(out, leaves, dout)
        results.append([out.detach(), lse.detach(), *grads])
    return differing("two layers", *results)
