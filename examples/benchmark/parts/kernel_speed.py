"""Speed of every kernel beside the call of its own library, forward and backward.

    python examples/benchmark/parts/kernel_speed.py
    python examples/benchmark/parts/kernel_speed.py --kernels flash4 flex --json speed.jsonl
    python examples/benchmark/parts/kernel_speed.py --device cpu --kernels torch --tokens 512

TFLOP/s count attended pairs only: 2 (d + e) FLOP per pair and query head forward, 2.5 times that
backward. "raw" is the library's call on the same tensors, "overhead" what the kernel takes beyond
it. A time is the median of runs between CUDA events, with L2 flushed before each; a kernel and its
library take turns. Packed documents have lengths drawn from those of a long-context corpus.

Each kernel is measured in a process of its own: one that crashes or hangs loses only the rest of
its own rows. Lines are printed, and written to the JSON file (one object per line), at once. What
would take long, judging by the kernel's speed at fewer tokens, is left out and reported.

The last table is the public op on one rank with autograd, forward and backward together.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))
    sys.path.insert(1, str(Path(__file__).parents[2]))

from benchmark.cases import BACKWARD_WORK
from own_process import Lost, Worker
from raw_attention import RAW, Pass, Problem
from speed.arguments import parse
from speed.clock import Clock
from speed.masks import Mask, masks
from speed.table import Row, Table, speeds, versions

from customized_ops.ring_attention import wrap_masked_attn_func
from customized_ops.ring_attention.core.kernels import (
    KERNELS,
    BackwardOperands,
    ForwardOperands,
    Pairs,
    Request,
    Scoring,
    refusal,
)


def tera_flop(mask: Mask, args: argparse.Namespace) -> float:
    """10^12 FLOP of a forward pass."""
    return 4e-12 * mask.mask.area * args.heads[0] * args.head_dim


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
        """Everything that is measured for the kernel on a mask."""
        row = mask.row(self.kernel.NAME)
        why = refusal(self.kernel, self._request(mask))
        if why is not None:
            row.notes.append(f"refuses: {why}")
            return row
        raw: list[Pass] = []
        if mask.raw and self.kernel.NAME in RAW:
            self._try(row, "raw call", lambda: raw.extend(self._raw(row, mask)))
        self._try(row, "kernel", lambda: self._kernel(row, mask, raw))
        if mask.shape_class == "causal" and mask.tokens == self.args.op_tokens:
            self._try(row, "op", lambda: self._op(row, mask, raw))
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
            tokens=mask.tokens,
        )

    def _try(self, row: Row, what: str, measure: Callable[[], None]) -> None:
        """Measure, or note why not: a failure of one library must not cost the others' figures."""
        try:
            measure()
        except torch.OutOfMemoryError:
            row.notes.append(f"{what}: out of memory")
        except Exception as error:
            row.notes.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")
        if self.args.device == "cuda":
            with suppress(RuntimeError):  # a broken GPU context: the next measurement reports it
                torch.cuda.empty_cache()

    def _kernel(self, row: Row, mask: Mask, raw: Sequence[Pass]) -> None:
        kernel, flop = self.kernel, tera_flop(mask, self.args)
        q, k, v, dout = self.tensors(mask.tokens)
        pairs = Pairs(mask.mask.slices, mask.tokens, mask.tokens)
        scoring = Scoring(self.args.head_dim**-0.5)
        out, lse = kernel.forward(ForwardOperands(q, k, v), pairs, scoring, None)
        out = out.to(self.dtype)

        def forward() -> Any:
            return kernel.forward(ForwardOperands(q, k, v), pairs, scoring, None)

        def backward() -> Any:
            given = BackwardOperands(dout, q, k, v, out, lse)
            return kernel.backward(given, pairs, scoring, None)

        row.forward, row.raw_forward = self._speeds(flop, forward, *raw[:1])
        row.backward, row.raw_backward = self._speeds(BACKWARD_WORK * flop, backward, *raw[1:])

    def _speeds(self, flop: float, own: Pass, *raw: Pass) -> tuple[float, float | None]:
        speed, *others = (flop / seconds for seconds in self.clock.seconds(own, *raw))
        return speed, others[0] if others else None

    def _raw(self, row: Row, mask: Mask) -> Sequence[Pass]:
        """The library's forward and backward, on tensors of their own, or nothing."""
        cu = None
        if mask.bounds:
            cu = torch.tensor(mask.bounds, dtype=torch.int32, device=self.args.device)
        longest = max(np.diff(mask.bounds).tolist(), default=0)
        passes = RAW[self.kernel.NAME](
            Problem(*self.tensors(mask.tokens), mask.window, cu, longest)
        )
        if passes is None:
            row.notes.append("raw call: the library has no single call for this")
        return passes or ()

    def _op(self, row: Row, mask: Mask, raw: Sequence[Pass]) -> None:
        *inputs, dout = self.tensors(mask.tokens)
        leaves = [t.requires_grad_() for t in inputs]

        def op() -> None:
            out = wrap_masked_attn_func(*leaves, mask.mask, kernel=self.kernel.NAME)
            torch.autograd.grad(out, leaves, dout)

        def library() -> None:
            for each in raw:
                each()

        both = (1 + BACKWARD_WORK) * tera_flop(mask, self.args)
        row.op, row.raw_op = self._speeds(both, op, *([library] if raw else []))


def chosen(args: argparse.Namespace) -> list[Mask]:
    """The masks to measure, those with the fewest tokens first."""
    return [
        mask
        for n in sorted({*args.tokens, args.op_tokens})
        for mask in masks(n, args.seed)
        if args.masks is None or mask.name.startswith(tuple(args.masks))
        if n in args.tokens or mask.name == "causal"
    ]


def expected_seconds(mask: Mask, kernel: str, rows: list[Row], args: argparse.Namespace) -> float:
    """Seconds of a forward and a backward, by the kernel's last speed with such a mask, or 0."""
    for r in reversed(rows):
        if (r.kernel, r.shape_class) == (kernel, mask.shape_class) and r.forward and r.backward:
            return tera_flop(mask, args) * (1 / r.forward + BACKWARD_WORK / r.backward)
    return 0.0


def measure(
    args: argparse.Namespace, table: Table, write: Callable[[dict[str, Any]], None]
) -> None:
    """Fill the table, and write its rows."""
    end = perf_counter() + args.seconds
    workers = {name: Worker(Bench, args, name) for name in args.kernels}
    try:
        for mask, name in product(chosen(args), workers):
            expected = expected_seconds(mask, name, table.rows, args)
            left = end - perf_counter()
            if left <= 0:
                row = mask.row(name, f"not measured: {args.seconds:.0f} s were over")
            elif expected > args.run_seconds:
                why = f"a forward and backward would take about {expected:.2g} s"
                row = mask.row(name, f"left out: {why}, more than --run-seconds")
            else:
                try:
                    row = workers[name].ask(mask, min(left, args.row_seconds))
                except Lost as lost:
                    row = mask.row(name, f"no figures from here on: {lost}")
            table.add(row)
            write(vars(row))
    finally:
        for worker in workers.values():
            worker.close()
        table.end()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the tables."""
    args = parse(arguments)

    def write(line: dict[str, Any]) -> None:
        if args.json:
            with args.json.open("a") as file:
                print(json.dumps(line), file=file)

    shown = {n: str(v) if isinstance(v, Path) else v for n, v in vars(args).items()}
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    write({"arguments": shown, "versions": versions(args.device), "gpu": gpu})
    table = Table(args)
    with TemporaryDirectory(ignore_cleanup_errors=True) as compiled:
        # The processes of this run share what flash-attn-4 compiles; other runs do not, since the
        # library does not notice every change of this package's mask functions.
        if "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR" not in os.environ:
            os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] = compiled
            os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"
        measure(args, table, write)
    if args.speeds:
        print(f"\nSPEEDS = {speeds(table.rows)}")


if __name__ == "__main__":
    main()
