"""Calls of flash-attn-4 that are replayed on a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from customized_ops.ring_attention import wrap_ring_attn_varlen_func
from customized_ops.ring_attention.core import tape
from customized_ops.ring_attention.core.kernels import (
    BackwardOperands,
    ForwardOperands,
    Pairs,
    Scoring,
)
from customized_ops.ring_attention.core.kernels.adapters import flash4
from customized_ops.ring_attention.core.mask.slices import UNBOUNDED, normalise
from customized_ops.ring_attention.core.run.replays import replay, seen_before

SCORING = Scoring(0.3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["one sequence", "packed", "many documents", "copied"])
def test_replayed_calls_are_the_library_s_bit_for_bit(kind: str) -> None:
    """Forward and backward on a GPU, of other tensors each; the backward in one order. The library
    copies an lse that is not aligned."""
    if (reason := flash4.missing()) is not None:
        pytest.skip(reason)
    documents = {"packed": [0, 300, 1100, 2048], "many documents": [*range(0, 2048, 6), 2048]}
    ends = documents.get(kind, [0, 2048])
    slices = normalise(np.array([(3, 2048, 0, 2045, -UNBOUNDED, 0)]))
    of = partial(later_rows, Pairs(slices, 2048, 2048)) if kind == "copied" else partial(step, ends)
    replayed = []
    whole = tape.Tape.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tape.Tape, "run", lambda *given: replayed.append(1) or whole(*given))
        for seed in range(seen_before.SEEN_BEFORE + 4):
            found = []
            for enabled in (True, False):
                with replay.replay(enabled):
                    found.append(of(on_gpu(2048, seed)))
            for mine, his in zip(*found, strict=True):
                assert torch.equal(mine, his)
    assert len(replayed) >= 4


@pytest.mark.gpu
def test_one_tape_does_for_other_documents_bit_for_bit() -> None:
    """Each step has documents of its own; calls of a few kinds are recorded among them."""
    if (reason := flash4.missing()) is not None:
        pytest.skip(reason)
    replayed, whole = list[int](), tape.Tape.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tape.Tape, "run", lambda *given: replayed.append(1) or whole(*given))
        for seed in range(4 * seen_before.SEEN_BEFORE):
            drawn = np.random.default_rng(seed)
            cuts = drawn.choice(np.arange(1, 2048), size=int(drawn.integers(8, 12)), replace=False)
            ends = [0, *sorted(map(int, cuts)), 2048]
            found = []
            for enabled in (True, False):
                with replay.replay(enabled):
                    found.append(step(ends, on_gpu(2048, seed)))
            for mine, his in zip(*found, strict=True):
                assert torch.equal(mine, his)
    assert len(replayed) > 2 * seen_before.SEEN_BEFORE


@pytest.mark.gpu
@pytest.mark.parametrize("before", [2, seen_before.SEEN_BEFORE + 2], ids=["few", "replayed"])
def test_packed_documents_in_a_cuda_graph_of_the_program(before: int) -> None:
    """Their tables are read on streams of the capture, and kept when the plan is not. Steps before
    the capture are on its stream, so their tapes would fit, too."""
    if (reason := flash4.missing()) is not None:
        pytest.skip(reason)
    ends, given, graph = [0, 300, 1100, 2048], on_gpu(2048, 0), torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(before):
            step(ends, given)
    with torch.cuda.graph(graph, stream=side):
        results = step(ends, given)
    for n in range(300):  # so many that the plan of the graph is forgotten
        step([0, n + 1, 2048], given)
    for seed in (1, 2):
        new = on_gpu(2048, seed)
        with torch.no_grad():
            for mine, other in zip(given, new, strict=True):
                mine.copy_(other)
        graph.replay()
        for mine, his in zip(results, step(ends, new), strict=True):
            assert torch.equal(mine, his)


def on_gpu(tokens: int, seed: int) -> list[torch.Tensor]:
    """q, k, v and the gradient of out."""
    source = torch.Generator("cuda").manual_seed(seed)
    shapes = [(tokens, heads, 128) for heads in (8, 2, 2, 8)]
    *leaves, dout = (
        torch.randn(s, dtype=torch.bfloat16, device="cuda", generator=source) for s in shapes
    )
    return [*(t.requires_grad_() for t in leaves), dout]


def step(ends: list[int], given: list[torch.Tensor]) -> list[torch.Tensor]:
    """out and the gradients."""
    *leaves, dout = given
    options: Any = {"causal": True, "deterministic": True, "kernel": "flash4"}
    out = wrap_ring_attn_varlen_func(*leaves, ends, ends, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def later_rows(pairs: Pairs, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """out and the gradients of the kernel's own call."""
    q, k, v, dout = (t.detach()[None] for t in given)
    out, lse = replay.kernel_forward(flash4, ForwardOperands(q, k, v), pairs, SCORING)
    operands = BackwardOperands(dout, q, k, v, out, lse, None)
    grads = replay.kernel_backward(flash4, operands, pairs, SCORING, deterministic=True)
    return [out, *grads]
