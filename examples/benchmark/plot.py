"""Shares of the ideal as a picture, from the JSON lines of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .cases import short


def read(path: Path) -> list[dict[str, Any]]:
    """The rows that have a share, whole problems on one GPU left out."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [x for x in lines if x["line"] == "row" and x["share_both"] and not x["whole"]]


def draw(source: Path, target: Path) -> None:
    """A bar a contestant, a group a case: share of the ideal, forward and backward together.

    Exits with a message where matplotlib is not installed or there is nothing to draw.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from None
    rows = read(source)
    if not rows:
        raise SystemExit(f"{source} has no row with a share of the ideal")
    cases = list(dict.fromkeys(_case(r) for r in rows))
    names = list(dict.fromkeys(_name(r, rows) for r in rows))
    figure = Figure(figsize=(max(7, 0.9 * len(cases) + 0.16 * len(rows)), 5), layout="constrained")
    axes = figure.subplots()
    width = 0.85 / len(names)
    for n, name in enumerate(names):
        own = {_case(r): 100 * r["share_both"] for r in rows if _name(r, rows) == name}
        places = [cases.index(case) + (n - len(names) / 2 + 0.5) * width for case in own]
        axes.bar(places, list(own.values()), width, label=name, color=f"C{n}" if n < 10 else None)
    axes.axhline(100, color="black", linewidth=0.8)
    axes.set_xticks(range(len(cases)), cases, rotation=20, ha="right")
    axes.set_ylabel("% of the ideal, forward + backward")
    axes.set_title(f"{rows[0]['ranks']} GPUs, {rows[0]['dtype']}, head dim {rows[0]['head_dim']}")
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(target, dpi=150)


def _case(row: dict[str, Any]) -> str:
    heads = f"{row['q_heads']}:{row['kv_heads']}"
    return f"{row['mask'].split(',')[0]}\n{short(row['tokens'])}, {heads}"


def _name(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The contestant, with its kernel where there are several of that name."""
    kernels = {r["kernel"] for r in rows if r["contestant"] == row["contestant"]}
    return row["contestant"] if len(kernels) == 1 else f"{row['contestant']} {row['kernel']}"
