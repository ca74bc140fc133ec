"""A plan as a text that shows its figures next to bounds that no plan can beat."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter, methodcaller

import numpy as np

from ...arrays import Numbers
from ...layout.layout_arguments import shorten
from ..cost_model import H200, HELD_BYTES, HELD_SHARDS, CostModel, Pass, times_alone
from ..heads import Sizes
from ..plan_value import PlanValue
from .figures import Measures, measures, over_least
from .hosts import HostFigures, host_bytes, host_figures

# Up to this many ranks have a line each; of more ranks, those at both ends and the busiest do.
ALL_RANKS = 16
ENDS = 4
BUSIEST = 2


def report(
    plan: PlanValue,
    q_heads: int = 1,
    kv_heads: int = 1,
    head_dim: int = 1,
    v_dim: int | None = None,
    itemsize: int = 2,
    costs: CostModel = H200,
    reduce_itemsize: int | None = None,
) -> str:
    """The plan as a text: who does how much, and how far that is from the least possible.

    Bytes are of the forward pass at batch 1: keys and values, and rows with their output and lse
    where a row is computed by a rank other than its holder. Arguments and errors are those of
    :func:`measures`.
    """
    figures = measures(plan, q_heads, kv_heads, head_dim, v_dim, itemsize, costs, reduce_itemsize)
    dims = f"{head_dim}" if v_dim in (None, head_dim) else f"{head_dim} (v: {v_dim})"
    text = f"{q_heads}:{kv_heads} heads of {dims}, {itemsize} bytes an element"
    sizes = Sizes.of(q_heads, kv_heads, head_dim, v_dim, itemsize)
    shares = np.unique(plan.heads_of_ranks(q_heads, kv_heads), axis=0)[::-1].tolist()
    each = " or ".join(f"{h}:{g}" for h, g in shares)
    header = _header(plan, figures, sizes, text, each)
    footer = _footer(figures, costs)
    if plan.topology is not None:
        footer.append(_between_hosts(host_bytes(plan, sizes, reduce_itemsize)))
    return "\n".join([*header, "", *_table(figures), "", *footer])


def _header(plan: PlanValue, figures: Measures, sizes: Sizes, heads: str, shares: str) -> list[str]:
    mask = plan.mask
    density = mask.area / max(mask.q_len * mask.k_len, 1)
    q, k = (shorten(layout.spec, 40) for layout in (plan.q_layout, plan.k_layout))
    away = figures.away_pairs.sum() / max(figures.pairs.sum(), 1)
    steps = plan.n_stages - 1
    if plan.gathered:
        stages = "gathered: all keys that a rank needs arrive, then are attended at once"
        stages += " (some more do, in ranges of few lengths)" * plan.rounded
    elif steps:
        stages = f"own keys first, while others arrive in {steps} step{'s' * (steps > 1)}"
        stages += ", from few ranks in each" * (plan.few_senders and steps > 1)
    else:
        stages = "one: no rank needs keys of another"
    lines = {
        "mask": f"{mask.q_len} queries x {mask.k_len} keys, {mask.area} pairs ({density:.1%})",
        "ranks": f"{plan.group_size}, {heads}",
        "teams": f"of {plan.team_size} ranks, which share out the heads of the same pairs: "
        f"{shares} each",
        "layout": q if plan.q_layout == plan.k_layout else f"q {q}, k {k}",
        "stages": stages,
        "groups": f"{plan.head_groups} of key heads: keys of one arrive while those before are "
        "attended",
        "grid": f"{plan.blocks} blocks: a team has keys of its block, and rows of the teams with "
        "its place in the others",
        "computed": f"{1 - away:.1%} of the pairs by the holder of the row, {away:.1%} by another",
    }
    if plan.topology is not None:
        lines["hosts"] = _hosts(plan, sizes)
    elif plan.held_keys:
        lines["held"] = _held(host_figures(plan), plan, sizes)
    if plan.blocks == 1:
        del lines["grid"]
    if plan.team_size == 1:
        del lines["teams"]
    if plan.head_groups == 1:
        del lines["groups"]
    return [f"{name:<10}{text}" for name, text in lines.items()]


def _hosts(plan: PlanValue, sizes: Sizes) -> str:
    """What crosses, and what is held."""
    figures, total = host_figures(plan), max(plan.mask.k_len, 1)
    once = ", each once" if plan.relays else ""
    return (
        f"{plan.topology}; {figures.tokens_into_host / total:.3g} of all keys cross into the "
        f"busiest{once} (at least {figures.tokens_into_host_at_least / total:.3g}); "
        + _held(figures, plan, sizes)
    )


def _held(figures: HostFigures, plan: PlanValue, sizes: Sizes) -> str:
    key_bytes = int(sizes.kv_bytes(max(sizes.kv_heads, 1)))
    shards = figures.received_tokens_at_once / max(*plan.k_layout.sizes, 1)
    held = figures.received_tokens_at_once * key_bytes
    said = (
        f"a rank holds at most {shards:.3g} shards ({format_bytes(held)}) of others' keys at once"
    )
    if rows := figures.received_rows_at_once:
        of_rows = format_bytes(figures.received_bytes_at_once(sizes) - held)
        said += f", and {rows} rows of others ({of_rows})"
    if plan.held_keys and shards > HELD_SHARDS and held <= HELD_BYTES:
        said += f"; {format_bytes(HELD_BYTES)} are allowed in any case"
    return said


def _table(figures: Measures) -> list[str]:
    """A line per rank, or per rank of note with a summary of all."""
    mean = figures.pairs.mean()
    ratio = figures.pairs / mean if mean else np.ones(len(figures.pairs))
    columns: list[tuple[str, int, Numbers, Callable[[float], str]]] = [
        ("tokens", 8, figures.tokens, _whole),
        ("pairs", 13, figures.pairs, _whole),
        ("of mean", 7, ratio, "{:.3f}".format),
        ("calls", 5, figures.calls, _whole),
        *([] if figures.slices is None else [("slices", 6, figures.slices, _whole)]),
        ("kv in", 8, figures.kv_received, _whole),
        ("rows in", 8, figures.rows_received, _whole),
        ("sends", 10, figures.sent_bytes, format_bytes),
        ("receives", 10, figures.received_bytes, format_bytes),
        ("at least", 10, figures.bounds.received, format_bytes),
    ]

    def line(name: str, value: Callable[[Numbers], float]) -> str:
        cells = [f"{shown(value(of)):>{width}}" for _, width, of, shown in columns]
        return " ".join([f"{name:>4}", *cells])

    lines = [" ".join(["rank", *(f"{name:>{width}}" for name, width, *_ in columns)])]
    shown_ranks, before = _of_note(figures), -1
    for rank in [*shown_ranks, len(ratio)]:
        if rank > before + 1:
            lines.append(" ...")
        if rank < len(ratio):
            lines.append(line(str(rank), itemgetter(rank)))
        before = rank
    if len(shown_ranks) < len(ratio):
        lines += [line(name, methodcaller(name)) for name in ("min", "mean", "max")]
    return lines


_whole = "{:.0f}".format


def _of_note(figures: Measures) -> list[int]:
    ranks = len(figures.tokens)
    if ranks <= ALL_RANKS:
        return list(range(ranks))
    shown = {*range(ENDS), *range(ranks - ENDS, ranks)}
    for column in (figures.pairs, figures.sent_bytes, figures.received_bytes):
        shown.update(np.argsort(-column, kind="stable")[:BUSIEST].tolist())
    return sorted(shown)


def _footer(figures: Measures, costs: CostModel) -> list[str]:
    bounds, received = figures.bounds, figures.received_bytes
    return [
        f"forward   {_times(figures.forward)}",
        f"backward  {_times(figures.backward)}",
        f"          at {costs.forward_flops / 1e12:.0f} and {costs.backward_flops / 1e12:.0f} "
        f"TFLOP/s, {costs.link_bytes / 1e9:.0f} GB/s a rank and way"
        f"{times_alone(costs.link_alone)}, "
        f"{costs.step_seconds * 1e6:.0f} us to start, {costs.call_seconds * 1e6:.0f} us a call"
        + (
            f", {costs.batch_seconds * 1e6:.0f} us a batch of messages and "
            f"{costs.message_seconds * 1e6:.0f} us a message"
            if costs.batch_seconds or costs.message_seconds
            else ""
        )
        + _between(costs),
        f"received  {format_bytes(received.sum())} by all ranks; "
        + _at_least(format_bytes(bounds.total), figures.bytes_gap)
        + " for these pairs a rank",
        f"          {format_bytes(received.max())} by the busiest; "
        + _at_least(format_bytes(bounds.busiest), figures.busiest_gap),
        f"pairs     {figures.pairs.max()} on the largest rank; "
        + _at_least(str(bounds.pairs), figures.pairs_gap),
        f"imbalance (largest / mean): {figures.imbalance:.3f}",
    ]


def _between_hosts(entering: list[tuple[int, int]]) -> str:
    return "hosts     into the busiest " + "; ".join(
        f"{name} {format_bytes(bytes_)}, "
        + _at_least(format_bytes(least), over_least(bytes_, least))
        for name, (bytes_, least) in zip(("forward", "backward"), entering, strict=True)
    )


def _between(costs: CostModel) -> str:
    if costs.topology is None:
        return ""
    return (
        f"; between hosts {costs.between_bytes / 1e9:.0f} GB/s{times_alone(costs.between_alone)}, "
        f"{costs.between_seconds * 1e6:.0f} us to start"
    )


def _at_least(least: str, ratio: float) -> str:
    """A bound, and how far above it a figure is."""
    if round(ratio, 4) == 1:
        return f"at least {least} (reached)"
    if ratio < 10:
        return f"at least {least} ({ratio - 1:+.1%})"
    return f"at least {least}"


def _times(pass_: Pass) -> str:
    attend, link, alone = pass_.attend_seconds, float(pass_.link.max()), float(pass_.alone.max())
    what = "in kernels and merges" if pass_.merge.any() else "in kernels"
    what = "starting kernels" if pass_.host_bound else what
    how = "while" if pass_.overlap else "after"
    then = f", and {format_seconds(alone)} for rows that nothing hides" if alone else ""
    return (
        f"{format_seconds(pass_.seconds):>8}: {format_seconds(attend)} {what} {how} "
        f"{format_seconds(link)} on links{then}"
    )


def format_seconds(seconds: float) -> str:
    """0.0015 -> '1.50 ms'."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def format_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
