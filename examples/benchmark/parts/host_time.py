"""What one attention call costs the host beyond its kernels.

    python examples/benchmark/parts/host_time.py                       CPU, the executor left out
    python examples/benchmark/parts/host_time.py --executor --device cuda
    python examples/benchmark/parts/host_time.py --kernel flash4 --device cuda
    torchrun --nproc-per-node 2 examples/benchmark/parts/host_time.py --kernel flash4 --device cuda

Each op is called repeatedly on few tokens, with autograd, and its forward and backward are timed on
the host alone: nothing inside waits for a GPU. By default this covers the path from the public
function to the executor, which returns tensors without values. With ``--executor`` the executor
runs too, and the kernel returns such tensors. ``--kernel`` runs a real kernel, and for comparison
its library's own causal call in a minimal autograd function. Of two ranks the other is absent
(:class:`FakeComm`), so messages cost nothing; under torchrun there are as many ranks as it starts,
and what they exchange is part of the time. A rank that attends to its own keys while others arrive
makes two calls per pass. Figures are the minimum of several rounds, since other work on the machine
only adds to them.

    target    80 us per pass with the executor, less than 40 us forward and 30 us backward without
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))

from raw_attention import RAW, Problem

from customized_ops.ring_attention import (
    AttnMask,
    Layout,
    wrap_masked_attn_func,
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
    wrap_sliding_window_attn_func,
    wrap_streaming_attn_func,
    wrap_zigzag_attn_func,
)
from customized_ops.ring_attention.core.comm.comm_groups import FakeComm, GroupLike
from customized_ops.ring_attention.op import bound, call

HEADS, KV_HEADS, DIM = 4, 2, 32
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
ROUNDS = 100

Attend = Callable[..., Any]


def ops(ranks: int, tokens: int) -> dict[str, tuple[Attend, bool]]:
    """The ops by name: functions of q, k, v, group and options that return out, and whether tokens
    are packed."""
    total = ranks * tokens
    cu = torch.tensor([0, total // 3, total], dtype=torch.int32)
    mask, zigzag = AttnMask.prefix_lm(total, total // 4), Layout.zigzag(total, ranks)
    packed = partial(wrap_ring_attn_varlen_func, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
    return {
        "ring": (wrap_ring_attn_func, False),
        "zigzag": (wrap_zigzag_attn_func, False),
        "zigzag shards": (partial(wrap_zigzag_attn_func, layout=zigzag), False),
        "sliding_window": (partial(wrap_sliding_window_attn_func, window_size=(32, 0)), False),
        "streaming": (partial(wrap_streaming_attn_func, window=32, sink_tokens=4), False),
        "masked": (partial(wrap_masked_attn_func, mask=mask), False),
        "ring_varlen": (packed, True),
    }


def _results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    b, length, h, _ = q.shape
    lse = q.new_empty(b, h, length, dtype=torch.float32)
    return q.new_empty(b, length, h, v.shape[-1]), lse


def _gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(map(torch.empty_like, tensors))


def without(what: str) -> ExitStack:
    """Replace the "executor" or the "kernel" by a stub that only makes the tensors it returns."""

    def forward(plan: Any, comm: Any, kernel: Any, given: Any, *_: Any) -> Any:
        return _results(given.q, given.v)

    def backward(plan: Any, comm: Any, kernel: Any, given: Any, *_: Any, **options: Any) -> Any:
        return _gradients(given.q, given.k, given.v)

    kernel = SimpleNamespace(
        NAME="none",
        forward=lambda given, *_: _results(given.q, given.v),
        backward=lambda given, *_, **__: _gradients(given.q, given.k, given.v),
    )
    stands_in: list[tuple[Any, str, Any]] = [(call, "choose", lambda *_: kernel)]
    if what == "executor":
        stands_in = [
            (bound, "attention_forward", forward),
            (bound, "attention_backward", backward),
        ]
    stack = ExitStack()
    for where, name, function in stands_in:
        stack.enter_context(mock.patch.object(where, name, function))
    return stack


def measure(
    attend: Attend, packed: bool, comm: GroupLike, given: argparse.Namespace
) -> tuple[float, float]:
    """(forward, backward) of one call in microseconds on the host, each the minimum over rounds."""
    q, k, v, dout = tensors(() if packed else (1,), given)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    call = partial(attend, *leaves, process_group=comm, kernel=given.kernel or "auto")
    return least(call, leaves, dout, given)


def measure_library(given: argparse.Namespace) -> tuple[float, float] | None:
    """The same for the kernel's library alone, or None if it has no such call."""
    *inputs, dout = tensors((1,), given)
    make = RAW.get(given.kernel)
    raw = None if make is None else make(Problem(*inputs, dout))
    if raw is None:
        return None

    class Library(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return as_given(raw[0]()[0], dout)

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> Any:
            return tuple(map(as_given, raw[1]()[:3], inputs))

    leaves = [t.requires_grad_() for t in inputs]
    return least(partial(Library.apply, *leaves), leaves, dout, given)


def as_given(result: Tensor, like: Tensor) -> Tensor:
    """[b, l, h, d], from a library that may put heads before tokens."""
    return result if result.shape == like.shape else result.transpose(1, 2)


def tensors(lead: tuple[int, ...], given: argparse.Namespace) -> list[Tensor]:
    """q, k, v and the gradient of out."""
    like: dict[str, Any] = {"device": given.device, "dtype": DTYPES[given.device]}
    heads = HEADS, KV_HEADS, KV_HEADS, HEADS
    return [torch.randn(*lead, given.tokens, h, DIM, **like) for h in heads]


def least(
    call: Callable[[], Tensor], leaves: list[Tensor], dout: Tensor, given: argparse.Namespace
) -> tuple[float, float]:
    """Microseconds on the host of a forward and of a backward; a round is calls of one, then of the
    other."""
    outs: list[Tensor] = []

    def forward() -> None:
        outs.append(call())

    def backward() -> None:
        torch.autograd.grad(outs.pop(), leaves, dout)

    best = [float("inf")] * 2
    for _ in range(ROUNDS):
        for n, run in enumerate((forward, backward)):
            if given.device == "cuda":
                torch.cuda.synchronize()
            began = perf_counter()
            for _ in range(given.calls):
                run()
            best[n] = min(best[n], perf_counter() - began)
    return best[0] / given.calls * 1e6, best[1] / given.calls * 1e6


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=DTYPES, default="cpu")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int, default=128, help="of each rank")
    parser.add_argument("--calls", type=int, default=10, help="calls in one round")
    parser.add_argument("--executor", action="store_true", help="run the executor too")
    parser.add_argument("--kernel", default=None, help="run the executor and this kernel too")
    parser.add_argument("--op", action="append", help="only this op; may be given again")
    return parser.parse_args(arguments)


def main() -> None:
    given = parse()
    group, say = None, partial(print, flush=True)
    if "WORLD_SIZE" in os.environ:
        if given.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if given.device == "cuda" else "gloo")
        group, given.ranks = dist.group.WORLD, [dist.get_world_size()]
        if dist.get_rank():
            say = lambda _: None  # noqa: E731
    stack = ExitStack()
    if given.kernel is None:
        stack = without("kernel" if given.executor else "executor")
    say(f"{'op':>16} {'ranks':>6} {'forward us':>11} {'backward us':>12}")
    if alone := measure_library(given):
        say(f"{'its library':>16} {'':>6} {alone[0]:>11.1f} {alone[1]:>12.1f}")
    with stack:
        for ranks in given.ranks:
            comm = group or (FakeComm(0, ranks) if ranks > 1 else None)
            for name, (attend, packed) in ops(ranks, given.tokens).items():
                if given.op is None or name in given.op:
                    forward, backward = measure(attend, packed, comm, given)
                    say(f"{name:>16} {ranks:>6} {forward:>11.1f} {backward:>12.1f}")
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
