"""The results of the kernel benchmark as tables."""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch


@dataclass
class Row:
    """A line of the table; speeds in TFLOP/s, None where not measured."""

    mask: str
    tokens: int
    kernel: str
    shape_class: str
    pairs: int
    forward: float | None = None
    backward: float | None = None
    raw_forward: float | None = None
    raw_backward: float | None = None
    op: float | None = None  # forward and backward of the public op
    raw_op: float | None = None  # the same of the library
    notes: list[str] = field(default_factory=list)


class Table:
    """The tables in markdown; each line is printed at once, so that a time limit loses none."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rows: list[Row] = []
        self._notes: dict[str, int] = {}
        h, g = args.heads
        name = torch.cuda.get_device_name() if args.device == "cuda" else args.device
        print(f"{name}, {versions(args.device)}, {args.dtype}, heads {h}:{g}, d {args.head_dim}")
        print("TFLOP/s: 4 x pairs x heads x d FLOP forward, 2.5 times that backward\n")
        passes = "".join(f" {p} | raw {p} | overhead |" for p in ("forward", "backward"))
        print(f"| mask | tokens | kernel |{passes} notes |")
        print("|---|---|---|---|---|---|---|---|---|---|", flush=True)

    def add(self, r: Row) -> None:
        """Print a line of the first table. New notes go to stderr at once, unless the table goes
        there too: a note in the middle would end the table."""
        self.rows.append(r)
        marks = "".join(self._mark(f"{r.kernel}: {note}") for note in r.notes)
        cells = [r.mask, f"{r.tokens}", r.kernel]
        for own, raw in ((r.forward, r.raw_forward), (r.backward, r.raw_backward)):
            cells += [_speed(own), _speed(raw), _beyond(own, raw)]
        print(f"| {' | '.join(cells)} | {marks} |", flush=True)

    def _mark(self, note: str) -> str:
        if note not in self._notes:
            self._notes[note] = len(self._notes) + 1
            if not os.path.sameopenfile(1, 2):
                print(f"[{self._notes[note]}] {note}", file=sys.stderr)
        return f"[{self._notes[note]}]"

    def end(self) -> None:
        """Print the notes, and the table of the public op."""
        print()
        for note, number in self._notes.items():
            print(f"- [{number}] {note}")
        ops = [r for r in self.rows if r.op is not None]
        if ops:
            print("\n| causal, forward and backward | tokens | op | raw | overhead |")
            print("|---|---|---|---|---|")
        for r in ops:
            cells = [r.kernel, f"{r.tokens}"]
            cells += [_speed(r.op), _speed(r.raw_op), _beyond(r.op, r.raw_op)]
            print(f"| {' | '.join(cells)} |")


def _speed(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _beyond(own: float | None, raw: float | None) -> str:
    return f"{100 * (raw / own - 1):.1f} %" if own and raw else ""


def versions(device: str) -> str:
    """The versions of everything that is measured."""
    found = [f"torch {torch.__version__}"]
    if device == "cuda":
        found.append(f"cuDNN {torch.backends.cudnn.version()}")
    for package in ("flash-attn-4", "transformer-engine", "triton"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def speeds(rows: list[Row]) -> dict[str, Any]:
    """{kernel: {class: {tokens: (forward, backward)}}}; of several masks in a class, the last one.
    Figures have at least three digits."""
    table: dict[str, Any] = defaultdict(lambda: defaultdict(dict))
    for r in rows:
        if r.forward and r.backward:
            figures = _three_digits(r.forward), _three_digits(r.backward)
            table[r.kernel][r.shape_class][r.tokens] = figures
    return {kernel: {c: dict(t) for c, t in classes.items()} for kernel, classes in table.items()}


def _three_digits(value: float) -> float:
    return round(value) if value >= 100 else float(f"{value:.3g}")
