"""A run, or the median of several, as a picture: shares of the ideal, and what was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.show.runs import Row, heads, label, name
from benchmark.show.text import short


def draw(rows: Sequence[Row], target: Path) -> None:
    """Draw a bar per contestant and a group of bars per case: the share of the ideal, forward and
    backward together. Below, if plans were made: predicted against measured times.

    Args:
        rows: from :func:`~.runs.read`.
    Exits with a message if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from None
    planned = [r for r in rows if r.get("account")]
    cases = list(dict.fromkeys(_case(r) for r in rows))
    width = max(7, 0.9 * len(cases) + 0.16 * len(rows))
    figure = Figure(figsize=(width, 10 if planned else 5), layout="constrained")
    panels = figure.subplots(1 + bool(planned), squeeze=False)[:, 0]
    _bars(panels[0], rows, cases)
    if planned:
        _predictions(panels[1], planned)
    figure.savefig(target, dpi=150)


def _bars(axes: Any, rows: Sequence[Row], cases: list[str]) -> None:
    names = list(dict.fromkeys(name(r, rows) for r in rows))
    width = 0.85 / len(names)
    for n, who in enumerate(names):
        own = {_case(r): 100 * r["share_both"] for r in rows if name(r, rows) == who}
        places = [cases.index(case) + (n - len(names) / 2 + 0.5) * width for case in own]
        axes.bar(places, list(own.values()), width, label=who, color=f"C{n}" if n < 10 else None)
    axes.axhline(100, color="black", linewidth=0.8)
    axes.set_xticks(range(len(cases)), cases, rotation=20, ha="right")
    axes.set_ylabel("% of the ideal, forward + backward")
    ranks = ", ".join(str(n) for n in dict.fromkeys(r["ranks"] for r in rows))
    axes.set_title(f"{ranks} ranks, {rows[0]['dtype']}, head dim {rows[0]['head_dim']}")
    axes.legend(fontsize="small", ncols=2)


def _predictions(axes: Any, rows: Sequence[Row]) -> None:
    """Points on the line were predicted correctly."""
    ends: list[float] = []
    for n, part in enumerate(("forward", "backward")):
        pairs = [(r[part], r["account"][part]) for r in rows if r[part]]
        axes.scatter(*zip(*pairs, strict=True), label=part, color=f"C{n}", s=18)
        ends += [end for pair in pairs for end in pair]
    axes.plot([min(ends), max(ends)], [min(ends), max(ends)], color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("measured, ms")
    axes.set_ylabel("predicted by the plan, ms")
    axes.legend(fontsize="small")


def _case(row: Row) -> str:
    return f"{label(row)}\n{short(row['tokens'])}, {heads(row)}"
