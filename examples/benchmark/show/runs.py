"""Several runs of the benchmark as one: the median of each figure."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

# Fields that are equal in two rows of one contestant in one case.
KEY = (
    *("ranks", "dtype", "head_dim", "mask", "tokens", "q_heads", "kv_heads"),
    *("contestant", "kernel"),
)
Row = dict[str, Any]


def read(paths: Sequence[Path]) -> list[Row]:
    """One row for each contestant in each case, in order of first appearance: medians over the
    files' rows that have a share of the ideal. Whole problems on one GPU are left out.

    In addition to the fields of a JSON row, a row has ``files``, the number of rows it combines,
    and ``spread``, the range from the smallest to the largest share of both passes.

    Exits with a message if there is no such row.
    """
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    grouped: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for x in lines:
        if x["line"] == "row" and x["share_both"] and not x["whole"]:
            grouped[tuple(x[name] for name in KEY)].append(x)
    if not grouped:
        raise SystemExit(f"{', '.join(map(str, paths))}: no row with a share of the ideal")
    return [_one(rows) for rows in grouped.values()]


def _one(rows: list[Row]) -> Row:
    shares = [row["share_both"] for row in rows]
    case = {name: rows[0][name] for name in KEY}
    return {**_median(rows), **case, "files": len(rows), "spread": max(shares) - min(shares)}


def _median(values: list[Any]) -> Any:
    """The median of numbers, by name in dicts; for anything else, the first that is not None."""
    values = [v for v in values if v is not None]
    if not values:
        return None
    if isinstance(values[0], dict):
        names = dict.fromkeys(name for v in values for name in v)
        return {name: _median([v.get(name) for v in values]) for name in names}
    if isinstance(values[0], list) and all(len(v) == len(values[0]) for v in values):
        return [_median(list(each)) for each in zip(*values, strict=True)]
    if isinstance(values[0], (int, float)) and not isinstance(values[0], bool):
        return median(values)
    return values[0]


def label(row: Row) -> str:
    """The mask without what depends on the length."""
    return str(row["mask"]).split(",")[0]


def heads(row: Row) -> str:
    """Heads of q, and of k and v."""
    return f"{row['q_heads']}:{row['kv_heads']}"


def name(row: Row, rows: Sequence[Row]) -> str:
    """The contestant, with its kernel if several have that name."""
    kernels = {r["kernel"] for r in rows if r["contestant"] == row["contestant"]}
    return row["contestant"] if len(kernels) == 1 else f"{row['contestant']} {row['kernel']}"
