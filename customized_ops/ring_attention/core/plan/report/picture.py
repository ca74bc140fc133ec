"""A picture of a plan: who holds what, who computes what, what moves, and when.

matplotlib is imported here and nowhere else, and only when a picture is asked for.
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from ...arrays import Ints
from ...layout import Layout
from ...topology import Topology
from ..cost_model import H200, CostModel
from ..heads import Sizes
from ..plan_value import PlanValue
from ..simulate import PassTimeline, simulate
from ..simulate.timeline import HOST, KERNEL
from .paint import PALE, PIXELS, Image, paint, parts_by_step
from .text import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

# Okabe and Ito's palette, which colour-blind readers tell apart, with its black as a grey, since
# black is for text. No larger palette is, so beyond eight ranks colours run from dark to light by
# rank.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#666666")
GOLDEN = 0.6180339887
STRIPED: dict[str, Any] = {"edgecolor": "white", "hatch": "////"}
# Up to this many ranks are named and striped; with more, little would be seen.
FEW = len(PALETTE)
MOST_TIMED, MERGES = 64, "#dd8888"  # ranks that are shown in time; colour of merges
HOST_LINE: dict[str, Any] = {"color": "#cc0000", "linewidth": 0.9, "linestyle": "--"}
MOST_HOSTS = 16  # up to this many hosts are marked: lines of more would hide what they part


def draw(
    plan: PlanValue,
    path: str | PathLike[str],
    q_heads: int = 1,
    kv_heads: int = 1,
    head_dim: int = 1,
    v_dim: int | None = None,
    itemsize: int = 2,
    costs: CostModel = H200,
) -> None:
    """Write a picture of ``plan`` to ``path``; the suffix says in which format (.png, .svg, .pdf).

    Left, the mask over queries (down) and keys (across) in the colours of the ranks that compute
    each part, striped where keys are received; strips along both sides show who holds each token.
    Right, the bytes that go from rank to rank, and each rank's forward pass in time, as
    :func:`.simulate` finds it by ``costs``. Dashed lines there are between hosts, up to MOST_HOSTS
    of them. With heads split, a colour is that of the first rank of a team.

    Args:
        q_heads, kv_heads, head_dim, v_dim, itemsize: as for :func:`.measures`.
    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no such format, or the heads do not suit the plan.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'seqshard[plot]'") from error
    sizes = Sizes.of(q_heads, kv_heads, head_dim, v_dim, itemsize)
    figure = Figure(figsize=(15, 9), dpi=100)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        2, 2, width_ratios=(1.3, 1), wspace=0.17, hspace=0.38,
        left=0.075, right=0.98, top=0.83, bottom=0.14,
    )  # fmt: skip
    colors = rank_colors(plan.group_size)
    _draw_mask(figure.add_subplot(grid[:, 0]), plan, colors)
    topology = plan.topology or costs.topology or Topology((plan.group_size,))
    links, times = (figure.add_subplot(grid[row, 1]) for row in range(2))
    _draw_links(links, *link_bytes(plan, sizes), relayed=plan.relays)
    _draw_times(times, simulate(plan, sizes, costs).forward, colors)
    _mark_hosts(links, times, topology)
    figure.suptitle(_title(plan, sizes, topology), fontsize=14, x=0.03, y=0.975, ha="left")
    figure.savefig(path)


def _title(plan: PlanValue, sizes: Sizes, topology: Topology) -> str:
    mask, received = plan.mask, plan.forward_bytes(*sizes)[:, 1]
    names = [layout.spec.partition(":")[0] for layout in (plan.q_layout, plan.k_layout)]
    layout = f"layout {names[0]}"
    if plan.q_layout != plan.k_layout:
        layout = f"layouts {names[0]} (q) and {names[1]} (k)"
    teams = f" in teams of {plan.team_size}" if plan.team_size > 1 else ""
    hosts = f" of {len(topology.hosts)} hosts" if len(topology.hosts) > 1 else ""
    density = mask.area / max(mask.q_len * mask.k_len, 1)
    return (
        f"{_tokens(mask.q_len)} queries × {_tokens(mask.k_len)} keys ({density:.1%} attended) on "
        f"{plan.group_size} ranks{hosts}{teams}, {layout}\n"
        f"largest rank computes {plan.imbalance(sizes.q_heads, sizes.kv_heads):.2f} × the mean;  "
        f"{format_bytes(received.sum())} move in the forward pass, at most "
        f"{format_bytes(received.max())} to a rank"
    )


def rank_colors(ranks: int) -> Image:
    """[ranks, 3]: the colour of each rank, between 0 and 1."""
    from matplotlib import colormaps
    from matplotlib.colors import to_rgb

    if ranks <= len(PALETTE):
        return np.array([to_rgb(color) for color in PALETTE[:ranks]])
    return np.asarray(colormaps["viridis"](np.linspace(0, 1, ranks)))[:, :3]


def link_bytes(plan: PlanValue, sizes: Sizes) -> tuple[Ints, Ints]:
    """(keys, rows): int64[P, P] bytes from rank [s] to rank [r] in the forward pass, batch 1: keys
    with values, and rows with the results that come back. Together they are ``forward_bytes``."""
    heads = plan.heads_of_ranks(sizes.q_heads, sizes.kv_heads)
    h, g = heads.T  # a rank receives, and sends home, its share
    keys, rows = plan.traffic()
    return keys * sizes.kv_bytes(g), rows * sizes.q_bytes(h) + (rows * sizes.result_bytes(h)).T


def _draw_mask(axes: Axes, plan: PlanValue, colors: Image) -> None:
    mask, parts = plan.mask, parts_by_step(plan)
    extent = (0, max(mask.k_len, 1), max(mask.q_len, 1), 0)
    image = paint(plan, parts, colors, striped=plan.group_size <= FEW)
    axes.imshow(image, extent=extent, aspect="auto", interpolation="auto")
    for layout, strip, along in (
        (plan.k_layout, axes.inset_axes((0, 1.012, 1, 0.035), sharex=axes), "x"),
        (plan.q_layout, axes.inset_axes((-0.047, 0, 0.035, 1), sharey=axes), "y"),
    ):
        _draw_strip(strip, layout, colors, along)
        if len(layout.pieces) <= 4 * FEW:
            for start in layout.pieces[1:, 1].tolist():
                line = axes.axvline if along == "x" else axes.axhline
                line(start, color="black", linewidth=0.6, alpha=0.35)
    axes.set_title("strips: who holds the token;  area: who computes the pair", fontsize=12, pad=32)
    axes.tick_params(left=False, labelleft=False)
    axes.set_ylabel(f"query tokens, 0 to {_tokens(mask.q_len)}", fontsize=11, labelpad=38)
    ticks = [n * mask.k_len // 4 for n in range(5)]
    axes.set_xticks(ticks, [_tokens(n) for n in ticks], fontsize=11)
    axes.set_xlabel("key tokens", fontsize=11, labelpad=2)
    handles = _legend_of_ranks(plan, colors, steps=int(parts[2].max(initial=0)))
    if handles:
        _legend(axes, handles, below=0.07, columns=len(handles) if len(handles) <= 6 else 5)


def _legend_of_ranks(plan: PlanValue, colors: Image, steps: int) -> list[Patch]:
    """Ranks by colour, and what stripes mean."""
    from matplotlib.patches import Patch

    size, ranks = plan.team_size, plan.group_size
    handles = []
    if ranks <= FEW:
        for r in range(0, ranks, size):
            name = f"rank {r}" if size == 1 else f"ranks {r}–{r + size - 1}"
            handles.append(Patch(facecolor=tuple(colors[r]), label=name))
    if steps:
        later = "; whiter: later" if steps > 1 else ""
        striped = STRIPED if ranks <= FEW else {"alpha": 1 - PALE}
        handles.append(Patch(facecolor="#777777", label="keys it holds"))
        handles.append(Patch(facecolor="#777777", label=f"keys it receives{later}", **striped))
    return handles


def _legend(axes: Axes, handles: list[Patch], below: float, columns: int) -> None:
    axes.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.5, -below), fontsize=11,
        ncols=columns, frameon=False, handlelength=1.4, columnspacing=1.2,
    )  # fmt: skip


def _draw_strip(axes: Axes, layout: Layout, colors: Image, along: str) -> None:
    """Who holds each token, as a bar of ranks' colours with their numbers."""
    pieces, total, across = layout.pieces, max(layout.total, 1), along == "x"
    if len(pieces):
        # At varying places in the pixels: else stripes finer than a pixel would look like one rank.
        within = (0.5 + np.arange(PIXELS) * GOLDEN) % 1 if len(pieces) > PIXELS / 4 else 0.5
        token = ((np.arange(PIXELS) + within) * total / PIXELS).astype(np.int64)
        image = colors[pieces[np.searchsorted(pieces[:, 1], token, side="right") - 1, 0]]
        extent = (0, total, 0, 1) if across else (0, 1, total, 0)
        axes.imshow(image[None] if across else image[:, None], extent=extent, aspect="auto")
    wide = pieces[pieces[:, 2] - pieces[:, 1] >= total / 40]
    for rank, start, stop, _ in wide.tolist():
        (axes.axvline if across else axes.axhline)(stop, color="white", linewidth=0.8)
        middle = ((start + stop) / 2, 0.5)
        x, y = middle if across else middle[::-1]
        dark = colors[rank] @ (0.3, 0.59, 0.11) < 0.6
        axes.text(
            x, y, str(rank), ha="center", va="center", fontsize=12,
            color="white" if dark else "black",
        )  # fmt: skip
    (axes.set_ylim if across else axes.set_xlim)(0, 1)
    axes.axis("off")


def _draw_links(axes: Axes, keys: Ints, rows: Ints, *, relayed: bool) -> None:
    total = keys + rows
    unit = format_bytes(int(total.max(initial=0))).split()[1]
    scale = 1024 ** ("B", "KiB", "MiB", "GiB").index(unit)
    ranks = len(total)
    shown = np.where(np.eye(ranks, dtype=bool), np.nan, total / scale)
    most = max(float(np.nan_to_num(shown).max()), 1e-9)
    axes.set_facecolor("#dddddd")
    image = axes.imshow(shown, cmap="Blues", vmin=0, vmax=most, aspect="auto")
    if ranks <= FEW:
        for s, r in np.argwhere(shown > 0).tolist():
            text = [f"{keys[s, r] / scale:.1f}"] if keys[s, r] else []
            text += [f"+{rows[s, r] / scale:.1f}"] if rows[s, r] else []
            axes.text(
                r, s, "\n".join(text), ha="center", va="center", linespacing=0.95,
                color="white" if shown[s, r] > 0.6 * most else "black",
                fontsize=11 if ranks <= FEW // 2 else 9,
            )  # fmt: skip
        axes.set_xticks(range(ranks))
        axes.set_yticks(range(ranks))
    else:
        axes.figure.colorbar(image, ax=axes, pad=0.02)
    what = "keys and values, + rows and their results" if rows.any() else "keys and values"
    title = f"needed: {what} (once for a host)" if relayed else f"sent: {what}"
    axes.set_title(f"{unit} {title}", fontsize=12)
    axes.set_xlabel("to rank", fontsize=11)
    axes.set_ylabel("from rank", fontsize=11)


def _draw_times(axes: Axes, forward: PassTimeline, colors: Image) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgba_array
    from matplotlib.patches import Patch

    links = {"keys": "#333333", "rows": "#888888", "results": "#c4c4c4"}
    ranks = len(forward.stop)
    step = -(-ranks // MOST_TIMED)  # bars of a rank are as high as those that are not shown
    few, shown = ranks <= FEW, np.arange(0, ranks, step)
    number, unit = format_seconds(forward.seconds).split()
    scale = float(number) / forward.seconds if forward.seconds else 1.0
    seen, corners, fill = set(), [], []
    for resource, what, sends, _, start, stop in forward.spans:
        if resource == HOST or sends:
            continue
        kernel = resource == KERNEL
        some = shown[stop[shown] > start[shown]]
        seen.update([what] * len(some))
        low, high = (-0.14, 0.38) if kernel else (-0.38, -0.16)
        color = MERGES if what == "merge" else colors[some] if kernel else links[what]
        left, right = start[some] * scale, stop[some] * scale
        if few:
            axes.barh(
                some + low, right - left, left=left, height=high - low, align="edge", color=color,
                edgecolor="white", linewidth=0.5, hatch="////" * (what == "remote"),
            )  # fmt: skip
        else:  # all bars in one piece, as thousands would take a minute
            top, bottom = (some + (0.5 + at) * step - 0.5 for at in (low, high))
            x, y = (left, right, right, left), (top, top, bottom, bottom)
            corners.append(np.stack([np.stack(x, 1), np.stack(y, 1)], 2))
            fill.append(np.broadcast_to(to_rgba_array(color), (len(some), 4)))
    if corners:
        bars = PolyCollection([*np.concatenate(corners)], facecolors=np.concatenate(fill))
        axes.add_collection(bars)
        axes.set_xlim(0, forward.seconds * scale)
    handles = [Patch(facecolor=links[k], label=f"{k} arrive") for k in links if k in seen]
    handles.append(Patch(facecolor=colors[0], label="kernels"))
    if "merge" in seen:
        handles.append(Patch(facecolor=MERGES, label="merges"))
    if "remote" in seen and few:
        handles.append(Patch(facecolor=colors[0], label="kernels, others' rows", **STRIPED))
    _legend(axes, handles, below=0.16, columns=3)
    some_ranks = "" if len(shown) == ranks else f", one rank in {shown[1]}"
    axes.set_title(f"forward pass as simulated{some_ranks}", fontsize=12)
    axes.set_xlabel(unit, fontsize=11, labelpad=2)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_ylabel("rank", fontsize=11)
    if few:
        axes.set_yticks(range(ranks))


def _mark_hosts(links: Axes, times: Axes, topology: Topology) -> None:
    """Draw a line where each host but the first begins, before its first rank."""
    if not 1 < len(topology.hosts) <= MOST_HOSTS:
        return
    links.set_xlabel("to rank; dashed: between hosts", fontsize=11)
    for host, rank in enumerate(np.cumsum(topology.hosts)[:-1].tolist(), 1):
        for line in (links.axhline, links.axvline, times.axhline):
            line(rank - 0.5, gid=f"host {host} from rank {rank}", **HOST_LINE)


def _tokens(count: int) -> str:
    """65536 -> '64K'."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if count and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)
