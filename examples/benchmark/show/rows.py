"""What was measured: rows, as a table, and as lines of JSON."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from benchmark.cases import BACKWARD_WORK, Case
from benchmark.measure.account import Account
from benchmark.show.text import markdown, number, percent, short, title


@dataclass
class Row:
    """A contestant in a case. Times in ms, the slowest rank's median; None: not measured.

    Attributes:
        area: attended pairs. share_*: shares of the fastest single GPU's times, and of the fewest
            cycles of any, divided by the number of ranks.
        peak_bytes: of a rank beyond its inputs. local_bytes: of its q, k, v and out.
        megahertz: of the slowest rank's clock. cycles: millions, of both passes, of the rank that
            takes the most; waiting for peers counts.
        new_ms: what a first call with a new length costs the host beyond a later one.
        tflops_forward, tflops_backward, tflops: per GPU.
        account: for this package's ops, what their plan predicts.
        checked: relative error and worst row, as in ``checking``.
        note: why there are no figures, or what they lack.
    """

    mask: str
    kind: str
    tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    ranks: int
    area: int
    contestant: str
    kernel: str
    whole: bool
    layout: str = ""
    forward: float | None = None
    backward: float | None = None
    both: float | None = None
    runs: int = 0
    tflops_forward: float | None = None
    tflops_backward: float | None = None
    tflops: float | None = None
    share_forward: float | None = None
    share_backward: float | None = None
    share_both: float | None = None
    megahertz: float | None = None
    cycles: float | None = None
    share_cycles: float | None = None
    peak_bytes: int | None = None
    local_bytes: int | None = None
    new_ms: float | None = None
    account: Account | None = None
    checked: list[float] | None = None
    note: str = ""

    def with_times(self, medians: list[float]) -> None:
        """Fill in times, and TFLOP/s per GPU."""
        gpus = 1 if self.whole else self.ranks
        forward = 4 * self.area * self.q_heads * self.head_dim / gpus / 1e9  # GFLOP, so per ms T
        self.both = medians[-1]
        self.tflops = (1 + BACKWARD_WORK) * forward / self.both
        if len(medians) > 1:
            self.forward, self.backward = medians[:2]
            self.tflops_forward = forward / self.forward
            self.tflops_backward = BACKWARD_WORK * forward / self.backward

    def share(self, ideal: dict[str, float]) -> None:
        """Fill in shares of the ideal, by pass; for one GPU, shares of the fastest one."""
        for name, best in ideal.items():
            own = getattr(self, name)
            if own:
                setattr(self, f"share_{name}", best * (self.ranks if self.whole else 1) / own)


def row_of(case: Case, contestant: Any, dtype: torch.dtype, ranks: int) -> Row:
    """A row with nothing measured yet."""
    h, g = case.heads
    return Row(
        mask=case.name,
        kind=case.kind,
        tokens=case.tokens,
        q_heads=h,
        kv_heads=g,
        head_dim=case.head_dim,
        dtype=str(dtype).removeprefix("torch."),
        ranks=ranks,
        area=case.mask.area,
        contestant=contestant.name,
        kernel=contestant.kernel,
        whole=contestant.whole,
    )


COLUMNS = (
    *("contestant", "kernel", "layout", "fwd ms", "bwd ms", "both ms", "TFLOP/s"),
    *("fwd", "bwd", "both", "at one clock", "MHz"),
    *("peak GiB", "x local", "new ms", "runs", "error", "note"),
)


def cells(row: Row) -> list[str]:
    """A row of the table."""
    speeds = (row.tflops_forward, row.tflops_backward, row.tflops)
    peak = times = None
    if row.peak_bytes and row.local_bytes:
        peak, times = row.peak_bytes / 2**30, row.peak_bytes / row.local_bytes
    layout = row.layout.split(":")[0].replace("chunks", "balanced")
    return [
        *(row.contestant, row.kernel, layout),
        *(number(t, 4) for t in (row.forward, row.backward, row.both)),
        ", ".join(f"{t:.3g}" for t in speeds if t is not None),
        *(percent(s) for s in (row.share_forward, row.share_backward, row.share_both)),
        *(percent(row.share_cycles), number(row.megahertz, 4)),
        *(number(peak), number(times), number(row.new_ms)),
        str(row.runs or ""),
        f"{row.checked[0]:.1e}" if row.checked else "",
        row.note,
    ]


def table(rows: list[Row]) -> str:
    """The rows of one case."""
    return markdown(COLUMNS, [cells(r) for r in rows], 3)


class Lines:
    """JSON, one object per line, written at once; nothing without a file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        if path is not None:
            path.write_text("")

    def add(self, kind: str, value: dict[str, Any]) -> None:
        """Write a line; kind: "run", "row" or "profile"."""
        if self._path is not None:
            with self._path.open("a") as file:
                print(json.dumps({"line": kind, **finite(value)}), file=file)

    def row(self, row: Row) -> None:
        """Write a row's line."""
        self.add("row", asdict(row))


def finite(value: Any) -> Any:
    """The value with infinity and NaN as text, since JSON has neither."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def versions(cuda: bool) -> dict[str, str]:
    """The versions of everything that is measured."""
    found = {"torch": torch.__version__}
    if cuda:
        found["GPU"] = torch.cuda.get_device_name()
        found["CUDA"] = str(torch.version.cuda)
        found["driver"] = _driver()
        found["cuDNN"] = str(torch.backends.cudnn.version())
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    for package in ("flash-attn-4", "transformer-engine", "triton", "ring-flash-attn", "yunchang"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def heading(case: Case, ideal: dict[str, float], how: str) -> str:
    """The heading above a case's table."""
    flop = 1e-12 * case.forward_flop
    lines = f"\n{title(case)}: {case.mask.area} pairs, {flop:.4g} TFLOP forward\n"
    if ideal:
        units = dict.fromkeys(ideal, "ms") | {"cycles": "million"}
        times = ", ".join(f"{name} {best:.4g} {units[name]}" for name, best in ideal.items())
        lines += f"ideal ({how}): {times}\n"
    else:
        lines += f"ideal: {how}\n"
    return lines


def left_out(case: Case, why: str) -> str:
    """A note on a case for which no time was left."""
    h, g = case.heads
    return f"\nleft out, as {why}: {case.name} {short(case.tokens)} {h}:{g}"
