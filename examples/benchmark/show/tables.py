"""Tables of one or more runs, in markdown: shares by length, this package's passes, its plans."""

from __future__ import annotations

from collections.abc import Sequence

from benchmark.compete.expected import OURS
from benchmark.measure.account import Account, error
from benchmark.show.runs import Row, heads, label, name
from benchmark.show.text import above, markdown, mebibytes, number, percent, short


def tables(rows: Sequence[Row]) -> str:
    """All tables, separately for each number of ranks."""
    return "\n\n".join(
        text
        for ranks in dict.fromkeys(r["ranks"] for r in rows)
        for text in _of_ranks(ranks, [r for r in rows if r["ranks"] == ranks])
    )


def _of_ranks(ranks: int, rows: list[Row]) -> list[str]:
    files = sorted({r["files"] for r in rows})
    many = f"{files[0]} to {files[-1]} runs" if len(files) > 1 else f"{files[0]} run"
    many += "s" * (len(files) == 1 and files[0] > 1)
    widest = max(r["spread"] for r in rows)
    said = f"{ranks} ranks, {rows[0]['dtype']}, head dim {rows[0]['head_dim']}: medians of {many}"
    if files[-1] > 1:
        said += f", whose shares differ by up to {100 * widest:.1f} points"
    kinds = dict.fromkeys((label(r), heads(r)) for r in rows)
    shares = [_shares([r for r in rows if (label(r), heads(r)) == kind]) for kind in kinds]
    own = [r for r in rows if r["contestant"].startswith(OURS)]
    found = [f"{said}.", *shares, _passes(own, rows)] if own else [f"{said}.", *shares]
    accounts = [r for r in own if r.get("account")]
    return [*found, _accounts(accounts, rows)] if accounts else found


def _shares(rows: list[Row]) -> str:
    """Shares of both passes: a line per contestant, a column per length."""
    lengths = sorted({r["tokens"] for r in rows})
    lines = []
    for who in dict.fromkeys(name(r, rows) for r in rows):
        of = {r["tokens"]: r for r in rows if name(r, rows) == who}
        lines.append([who, *(percent(of[n]["share_both"], 0) if n in of else "–" for n in lengths)])
    head = f"{label(rows[0])}, {heads(rows[0])} heads"
    return markdown([head, *(short(n) for n in lengths)], lines, 1)


def _case(row: Row, rows: Sequence[Row]) -> list[str]:
    return [label(row), short(row["tokens"]), heads(row), name(row, rows)]


def _passes(own: list[Row], rows: Sequence[Row]) -> str:
    """This package's ops: each pass, and how far apart runs are."""
    head = ["mask", "tokens", "heads", "op", "forward", "backward", "both", "at one clock"]
    head += ["TFLOP/s a GPU"]
    lines = []
    for r in own:
        parts = (r[f"share_{part}"] for part in ("forward", "backward", "both"))
        at_one = percent(r.get("share_cycles"))
        speeds = (r.get("tflops_forward"), r.get("tflops_backward"), r["tflops"])
        speed = ", ".join(number(s) for s in speeds if s is not None)
        many = f"{r['files']}, {100 * r['spread']:.1f} points"
        lines.append([*_case(r, rows), *(percent(p, 0) for p in parts), at_one, speed, many])
    return markdown([*head, "runs, spread"], lines, 4)


def _accounts(own: list[Row], rows: Sequence[Row]) -> str:
    """This package's ops: what plans predict, and what was measured."""
    head = ["mask", "tokens", "heads", "op", "predicted forward", "backward", "received MiB"]
    head += ["above least", "backward MiB", "pairs above least", "imbalance", "plan ms"]
    lines = []
    for r in own:
        said = Account(**r["account"])
        memory = said.memory(r["peak_bytes"])
        lines.append(
            [
                *(*_case(r, rows), error(said.forward, r["forward"])),
                *(error(said.backward, r["backward"]), mebibytes(said.received[0])),
                *(above(said.received[0], said.least), mebibytes(said.received[1])),
                *(above(said.pairs, said.least_pairs), f"{said.imbalance:.3f}"),
                *(number(said.plan_ms), "" if memory is None else f"{memory:.2f}"),
            ]
        )
    return markdown([*head, "memory x"], lines, 4)
