"""Speed of every kernel beside the call of its own library, forward and backward.

    python tests/benchmarks/kernel_speed.py
    python tests/benchmarks/kernel_speed.py --kernels flash4 flex --tokens 8192 --json speed.jsonl
    python tests/benchmarks/kernel_speed.py --device cpu --kernels torch reference --tokens 512

TFLOP/s count attended pairs only: 2 (d + e) FLOP a pair and query head forward, 2.5 times that
backward. "raw" is the library's call on the same tensors, "+" what the kernel takes beyond it. A
time is the median of runs between CUDA events, a flushed L2 before each. Packed documents have
lengths drawn from those of a long-context corpus.

Each kernel is measured in a process of its own: one that crashes or hangs loses the rest of its own
rows. Lines are printed, and written to the JSON file (one object a line), as they come.

The last table is the public op on one rank with autograd, forward and backward together.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from own_process import Lost, Worker
from plan_speed import HISTOGRAM
from raw_attention import RAW, Pass, Problem
from speed_table import BACKWARD_WORK, Row, Table, speeds, versions

from customized_ops.ring_attention import AttnMask, wrap_masked_attn_func
from customized_ops.ring_attention.core.kernels import (
    KERNELS,
    Kernel,
    Pairs,
    Request,
    Scoring,
    refusal,
)

BLOCK = 512  # of block-causal
OP_TOKENS = 8192
CACHE_BYTES = 256 * 2**20  # more than an L2 holds


@dataclass(frozen=True)
class Mask:
    """A mask of the table, with its class of speed and what libraries are told of it."""

    name: str
    shape_class: str
    mask: AttnMask
    window: int = -1
    bounds: tuple[int, ...] = ()
    raw: bool = True

    def row(self, kernel: str, *notes: str) -> Row:
        """The kernel's line for this mask, with nothing measured yet."""
        n, pairs = self.mask.q_len, self.mask.area
        return Row(self.name, n, kernel, self.shape_class, pairs, notes=list(notes))


def documents(tokens: int, seed: int) -> tuple[int, ...]:
    """Bounds of documents that fill ``tokens``, drawn from HISTOGRAM; the last is cut to fit."""
    draw = np.random.default_rng(seed)
    shortest, longest, count = np.array(HISTOGRAM).T
    bounds = [0]
    while bounds[-1] < tokens:
        kind = draw.choice(len(count), p=count / count.sum())
        length = int(draw.integers(shortest[kind], longest[kind] + 1))
        bounds.append(min(tokens, bounds[-1] + length))
    return tuple(bounds)


def masks(n: int, seed: int) -> list[Mask]:
    """The masks of the table for ``n`` tokens."""
    bounds = documents(n, seed)
    windows = [
        Mask(f"window {w}", "window", AttnMask.dense(n, window=(w, 0)), window=w)
        for w in (1024, 4096)
        if w < n
    ]
    return [
        Mask("causal", "causal", AttnMask.causal(n)),
        Mask(
            f"packed, {len(bounds) - 1} documents",
            "packed",
            AttnMask.varlen(bounds, causal=True),
            bounds=bounds,
        ),
        *windows,
        Mask(f"block-causal {BLOCK}", "sparse", AttnMask.block_causal(n, BLOCK), raw=False),
    ]


class Clock:
    """Median seconds of a function."""

    def __init__(self, device: str, runs: int) -> None:
        self._cuda, self._runs = device == "cuda", runs
        if self._cuda:
            self._cache = torch.empty(CACHE_BYTES, dtype=torch.int8, device=device)

    def seconds(self, function: Pass) -> float:
        """Two runs to warm up and compile, then up to ``runs``, about half a second of them."""
        function()
        self._wait()
        began = perf_counter()
        function()
        self._wait()
        once = perf_counter() - began
        runs = max(3, min(self._runs, int(0.5 / max(once, 1e-6))))
        if not self._cuda:
            return median(_timed(function) for _ in range(runs))
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
        for start, stop in events:
            self._cache.zero_()
            start.record()
            function()
            stop.record()
        self._wait()
        return median(start.elapsed_time(stop) for start, stop in events) / 1e3

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def _timed(function: Pass) -> float:
    began = perf_counter()
    function()
    return perf_counter() - began


class Bench:
    """Measures one kernel on one set of shapes."""

    def __init__(self, args: argparse.Namespace, kernel: str) -> None:
        self.args, self.kernel = args, KERNELS[kernel]
        self.clock = Clock(args.device, args.runs)
        self.dtype = getattr(torch, args.dtype)

    def tensors(self, n: int) -> tuple[Tensor, ...]:
        """q, k, v and dout."""
        h, g = self.args.heads
        source = torch.Generator(self.args.device).manual_seed(0)
        return tuple(
            torch.randn(
                (1, n, heads, self.args.head_dim),
                generator=source,
                device=self.args.device,
                dtype=self.dtype,
            )
            for heads in (h, g, g, h)
        )

    def __call__(self, mask: Mask) -> Row:
        """All that is measured of the kernel on a mask."""
        n, kernel, row = mask.mask.q_len, self.kernel, mask.row(self.kernel.NAME)
        why = refusal(kernel, self._request(mask))
        if why is not None:
            row.notes.append(f"refuses: {why}")
            return row
        flop = 4e-12 * mask.mask.area * self.args.heads[0] * self.args.head_dim
        self._try(row, "kernel", lambda: self._kernel(row, kernel, mask, flop))
        if mask.raw and kernel.NAME in RAW:
            self._try(row, "raw call", lambda: self._raw(row, kernel, mask, flop))
        if mask.shape_class == "causal" and n == self.args.op_tokens:
            self._try(row, "op", lambda: self._op(row, kernel, mask, flop))
        return row

    def _request(self, mask: Mask) -> Request:
        h, g = self.args.heads
        return Request(
            device=torch.device(self.args.device),
            dtype=self.dtype,
            head_dim=self.args.head_dim,
            v_dim=self.args.head_dim,
            q_heads=h,
            kv_heads=g,
            features=("window",) if mask.window >= 0 else (),
            shape_class=mask.shape_class,
            tokens=mask.mask.k_len,
        )

    def _try(self, row: Row, what: str, measure: Callable[[], None]) -> None:
        """Measure, or note why not: no figure of one library must cost those of the others."""
        try:
            measure()
        except torch.OutOfMemoryError:
            row.notes.append(f"{what}: out of memory")
        except Exception as error:
            row.notes.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")
        if self.args.device == "cuda":
            torch.cuda.empty_cache()

    def _kernel(self, row: Row, kernel: Kernel, mask: Mask, flop: float) -> None:
        q, k, v, dout = self.tensors(mask.mask.q_len)
        pairs = Pairs(mask.mask.slices, mask.mask.q_len, mask.mask.k_len)
        scoring = Scoring(self.args.head_dim**-0.5)
        out, lse = kernel.forward(q, k, v, pairs, scoring, None)
        out = out.to(self.dtype)
        row.forward = flop / self.clock.seconds(
            lambda: kernel.forward(q, k, v, pairs, scoring, None)
        )
        row.backward = (
            BACKWARD_WORK
            * flop
            / self.clock.seconds(
                lambda: kernel.backward(dout, q, k, v, out, lse, pairs, scoring, None)
            )
        )

    def _raw(self, row: Row, kernel: Kernel, mask: Mask, flop: float) -> None:
        cu = None
        if mask.bounds:
            cu = torch.tensor(mask.bounds, dtype=torch.int32, device=self.args.device)
        longest = max(np.diff(mask.bounds).tolist(), default=0)
        passes = RAW[kernel.NAME](Problem(*self.tensors(mask.mask.q_len), mask.window, cu, longest))
        if passes is None:
            row.notes.append("raw call: the library has no single call for this")
            return
        row.raw_forward = flop / self.clock.seconds(passes[0])
        row.raw_backward = BACKWARD_WORK * flop / self.clock.seconds(passes[1])

    def _op(self, row: Row, kernel: Kernel, mask: Mask, flop: float) -> None:
        *inputs, dout = self.tensors(mask.mask.q_len)
        leaves = [t.requires_grad_() for t in inputs]

        def both() -> None:
            out = wrap_masked_attn_func(*leaves, mask.mask, kernel=kernel.NAME)
            torch.autograd.grad(out, leaves, dout)

        row.op = (1 + BACKWARD_WORK) * flop / self.clock.seconds(both)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Speed of attention kernels.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--kernels",
        nargs="+",
        choices=list(KERNELS),
        default=[name for name in KERNELS if name != "reference"],
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 8192, 32768])
    parser.add_argument("--op-tokens", type=int, default=OP_TOKENS, help="length of the last table")
    parser.add_argument("--heads", nargs=2, type=int, default=[32, 8], help="of q, of k and v")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--masks", nargs="+", help="only masks that start so, as in: causal packed")
    parser.add_argument("--runs", type=int, default=20, help="most runs behind a median")
    parser.add_argument("--seed", type=int, default=0, help="of the documents' lengths")
    parser.add_argument("--seconds", type=float, default=180, help="start nothing after these")
    parser.add_argument("--row-seconds", type=float, default=90, help="most for a row")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--speeds", action="store_true", help="print them as a Python literal too")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the tables."""
    args = parse(arguments)
    began = perf_counter()
    written = args.json.open("w") if args.json else None

    def write(line: dict[str, Any]) -> None:
        if written:
            print(json.dumps(line), file=written, flush=True)

    table = Table(args)
    shown = {n: str(v) if isinstance(v, Path) else v for n, v in vars(args).items()}
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    write({"arguments": shown, "versions": versions(args.device), "gpu": gpu})
    workers = {name: Worker(Bench, args, name) for name in args.kernels}
    for mask in (mask for n in args.tokens for mask in masks(n, args.seed)):
        if args.masks is not None and not mask.name.startswith(tuple(args.masks)):
            continue
        for name, worker in workers.items():
            if perf_counter() - began > args.seconds:
                row = mask.row(name, f"not measured: {args.seconds:.0f} s were over")
            else:
                try:
                    row = worker.ask(mask, args.row_seconds)
                except Lost as why:
                    row = mask.row(name, f"no figures from here on: {why}")
            table.add(row)
            write(vars(row))
    for worker in workers.values():
        worker.close()
    table.end()
    if args.speeds:
        print(f"\nSPEEDS = {speeds(table.rows)}")


if __name__ == "__main__":
    main()
