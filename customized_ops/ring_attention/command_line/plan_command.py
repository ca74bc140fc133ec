"""The command ``plan``: what every rank moves and computes; needs no device or process group."""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from annotations.progress import stage

from ..core.layout import Layout
from ..core.mask import AttnMask
from ..core.plan import Plan, make_plan
from ..core.plan.choose.search import ASSIGNMENTS
from ..core.plan.cost_model import CostModel
from ..core.plan.heads import Sizes
from ..core.plan.report.hosts import host_figures
from ..core.plan.report.picture import draw
from ..core.plan.simulate import Timeline, simulate
from ..core.report import report
from ..core.topology import Topology
from .option_types import heads, positive, reach, size, size_list, team


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("--mask", choices=MASKS, default="causal", help="causal if not given")
    add("--tokens", type=positive, metavar="N", help="of the sequence; 64K and 1M are sizes, too")
    add("--ranks", type=positive, required=True, metavar="P")
    known = ", ".join(LAYOUTS)
    add("--layout", default="contiguous", help=f"{known}, or tokens per rank as N,N,...")
    add("--chunk", type=positive, metavar="N", help="tokens that a layout keeps together")
    add("--heads", type=heads, default=(32, 8), metavar="Q[:KV]", help="32:8 if not given")
    add("--head-dim", type=positive, default=128, metavar="D")
    add("--v-dim", type=positive, metavar="D", help="the head dim if not given")
    add("--itemsize", type=positive, default=2, metavar="BYTES", help="per element")
    add("--assignment", choices=ASSIGNMENTS, default="auto", help="who computes what")
    add("--stages", type=int, metavar="N", help="0 gathers; chosen if not given")
    said = "ranks that split heads: 1 if not given; auto, as attention has it if it is not told"
    add("--team-size", type=team, default=1, metavar="N", help=said)
    add("--head-groups", type=positive, metavar="N", help="in which keys arrive; chosen if not")
    add(
        "--hosts",
        default="1",
        metavar="N",
        help="with as many ranks each; or 8x4, or ranks of each as 4,4,2",
    )
    said = "rates of a CostModel, in bytes, operations or s: between_bytes=25e9,call_seconds=1e-4"
    add("--costs", action="append", default=[], metavar="RATE=N,...", help=said)
    add("--simulate", action="store_true", help="both passes in time, event by event")
    add("--json", action="store_true", help="figures of hosts and times as one JSON object")
    add("--draw", metavar="PATH", help="a picture too: .png, .svg or what else matplotlib writes")
    masks = parser.add_argument_group("options of masks")
    add = masks.add_argument
    add("--window", type=reach, metavar="LEFT[,RIGHT]", help="tokens seen beside a token's own")
    add("--documents", type=size, metavar="N", help="varlen: so many, equally long")
    add("--cu-seqlens", type=size_list, metavar="0,N,...", help="varlen: where documents end")
    add(
        "--documents-file",
        type=Path,
        metavar="FILE",
        help="varlen: lengths of documents, integers"
        " between commas or lines; the first that fill --tokens, if that is given",
    )
    add("--causal", action=argparse.BooleanOptionalAction, help="varlen: in each document (yes)")
    for name in COUNTS:
        takers = [m for m, make in MASKS.items() if name in inspect.signature(make).parameters]
        add(_flags([name]), type=size, metavar="N", help=", ".join(takers))


def plan_report(options: argparse.Namespace) -> str:
    """Make the plan, draw it if asked to, and return its report."""
    mask = _mask(options)
    costs = _costs(options)
    with stage(f"layout {options.layout}"):
        layout = _layout(options, mask, costs.topology)
    with stage("planning"):
        plan = make_plan(
            mask,
            layout,
            assignment=options.assignment,
            stages=options.stages,
            heads=options.heads,
            head_dim=options.head_dim,
            v_dim=options.v_dim,
            itemsize=options.itemsize,
            team_size=options.team_size,
            head_groups=options.head_groups,
            costs=costs,
        )
    q_heads, kv_heads = options.heads
    sizes = Sizes.of(q_heads, kv_heads, options.head_dim, options.v_dim, options.itemsize)
    if options.draw is not None:
        draw(plan, options.draw, *sizes, costs)
    timeline = None
    if options.simulate:
        with stage("simulating"):
            timeline = simulate(plan, sizes, costs)
    if options.json:
        return _json(plan, costs, sizes, timeline)
    if timeline is not None:
        return str(timeline)
    with stage("counting"):
        return report(plan, *sizes, costs)


def _costs(options: argparse.Namespace) -> CostModel:
    """The cost model of a group on the given hosts."""
    hosts, ranks = options.hosts, options.ranks
    count = int(hosts) if hosts.isdecimal() else 0
    if count and ranks % count:
        raise ValueError(f"--hosts {hosts} does not divide --ranks {ranks}")
    topology = Topology.parse(f"{count}x{ranks // count}" if count else hosts, "--hosts")
    if topology.size != ranks:
        raise ValueError(f"--hosts {hosts} has {topology.size} ranks, --ranks is {ranks}")
    costs = CostModel.over(topology)
    given = ",".join(options.costs)
    rates = costs.with_rates(given, "--costs")
    if costs.topology is None and "between" in given:
        raise ValueError("--costs has a rate between hosts, but there is one host (see --hosts)")
    if costs.topology is None and "link_alone" in given:
        raise ValueError(
            "--costs has link_alone, which is of messages, but ranks of one host write into one "
            "another's memory (see --hosts)"
        )
    return rates


def _json(plan: Plan, costs: CostModel, sizes: Sizes, timeline: Timeline | None) -> str:
    forward, backward = costs.passes(plan, *sizes)
    times = {"forward_seconds": forward.seconds, "backward_seconds": backward.seconds}
    if timeline is not None:
        times["simulated_forward_seconds"] = timeline.forward_seconds
        times["simulated_backward_seconds"] = timeline.backward_seconds
    figures = host_figures(plan)
    held = {"received_bytes_at_once": figures.received_bytes_at_once(sizes)}
    names = "team_size", "head_groups", "n_stages", "blocks", "rounded"
    kind = {name: getattr(plan, name) for name in names}
    return json.dumps({**asdict(figures), **held, **times, **kind})


def _varlen(
    cu_seqlens: Sequence[int], causal: bool = True, window: int | tuple[int, int] = -1
) -> AttnMask:
    sides = (-1, -1) if window == -1 else _sides(window)
    return AttnMask.varlen(cu_seqlens, causal=causal, window=sides)


def _sides(window: int | tuple[int, int]) -> tuple[int, int]:
    """A single number means that many tokens before a token, and none after it."""
    return window if isinstance(window, tuple) else (window, 0)


# Functions that make a mask of n tokens, by name. Each parameter is the option of the same name.
MASKS: dict[str, Callable[..., AttnMask]] = {
    "full": lambda n: AttnMask.dense(n),
    "causal": lambda n: AttnMask.dense(n, causal=True),
    "window": lambda n, window: AttnMask.dense(n, window=_sides(window)),
    "varlen": _varlen,
    "streaming": AttnMask.streaming,
    "prefix_lm": AttnMask.prefix_lm,
    "block_causal": AttnMask.block_causal,
    "strided": AttnMask.strided,
    "global_local": AttnMask.global_local,
    "star": AttnMask.star,
}
LAYOUTS: dict[str, Callable[..., Layout]] = {
    "contiguous": Layout.contiguous,
    "zigzag": Layout.zigzag,
    "striped": Layout.striped,
    "balanced": Layout.balanced,
}
COUNTS = ("sink", "prefix", "block", "stride", "global_tokens", "query")
MASK_OPTIONS = ("window", *COUNTS, "causal")
DOCUMENT_OPTIONS = ("documents", "cu_seqlens", "documents_file")


def _mask(options: argparse.Namespace) -> AttnMask:
    given = {name: getattr(options, name) for name in MASK_OPTIONS}
    packed = [name for name in DOCUMENT_OPTIONS if getattr(options, name) is not None]
    if options.mask == "varlen":
        if len(packed) != 1:
            raise ValueError(f"--mask varlen needs one of {_flags(DOCUMENT_OPTIONS)}")
        return _call("--mask varlen", _varlen, {"cu_seqlens": _documents(options)}, given)
    if packed:
        raise ValueError(f"{_flags(packed)} is for --mask varlen, not --mask {options.mask}")
    if options.tokens is None:
        raise ValueError(f"--mask {options.mask} needs --tokens")
    return _call(f"--mask {options.mask}", MASKS[options.mask], {"n": options.tokens}, given)


def _documents(options: argparse.Namespace) -> list[int]:
    """Cumulative lengths of the documents; from a file, as many as fit in --tokens."""
    tokens = options.tokens
    if options.documents is not None:
        if tokens is None:
            raise ValueError("--documents needs --tokens")
        if not 1 <= options.documents <= tokens:
            raise ValueError(f"--documents must be from 1 to {tokens}, got {options.documents}")
        return [n * tokens // options.documents for n in range(options.documents + 1)]
    if options.cu_seqlens is not None:
        if tokens not in (None, options.cu_seqlens[-1]):
            raise ValueError(f"--cu-seqlens ends at {options.cu_seqlens[-1]}, --tokens is {tokens}")
        return options.cu_seqlens
    path = options.documents_file
    words = re.split(r"[\s,]+", path.read_text().strip())
    wrong = [word for word in words if not re.fullmatch(r"\d+", word)]
    if wrong:
        raise ValueError(
            f"{path}: lengths of documents must be integers, between "
            f"commas or lines and with no header, got {wrong[0]!r}"
        )
    ends = np.cumsum([0, *(int(word) for word in words)])
    if tokens is None:
        return ends.tolist()
    if ends[-1] < tokens:
        raise ValueError(f"{path} has {ends[-1]} tokens, --tokens asks for {tokens}")
    return [*ends[ends < tokens].tolist(), tokens]


def _layout(options: argparse.Namespace, mask: AttnMask, topology: Topology | None) -> Layout:
    if options.layout not in LAYOUTS:
        if not re.fullmatch(r"\d+[KM]?(,\d+[KM]?)*", options.layout.upper()):
            names = ", ".join(LAYOUTS)
            raise ValueError(f"--layout is {names}, or N,N,...; got {options.layout!r}")
        sizes = size_list(options.layout)
        if len(sizes) != options.ranks or sum(sizes) != mask.q_len:
            raise ValueError(
                f"--layout lists {len(sizes)} sizes of {sum(sizes)} tokens in all, for "
                f"{options.ranks} ranks and {mask.q_len} tokens"
            )
        return Layout.from_sizes(sizes)
    known = {
        "total": mask.q_len,
        "mask": mask,
        "group_size": options.ranks,
        "topology": topology,
    }
    make = LAYOUTS[options.layout]
    # A striped layout calls a block what other layouts call a chunk.
    name = "block" if "block" in inspect.signature(make).parameters else "chunk"
    return _call(f"--layout {options.layout}", make, known, {name: options.chunk})


def _call(what: str, make: Callable[..., Any], known: dict[str, Any], given: dict[str, Any]) -> Any:
    """Call ``make`` with those of the arguments that it has parameters for.

    Args:
        known: arguments by parameter; ``make`` need not have all of them.
        given: options by parameter, None where not given. An option that ``make`` lacks is an
            error.
    Raises:
        ValueError: an option is missing, or ``make`` does not take it.
    """
    parameters = inspect.signature(make).parameters
    chosen = {name: value for name, value in given.items() if value is not None}
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in {**known, **chosen}:
            raise ValueError(f"{what} needs {_flags([name])}")
    strange = [name for name in chosen if name not in parameters]
    if strange:
        takes = _flags([name for name in given if name in parameters]) or "no such option"
        raise ValueError(f"{what} takes {takes}, not {_flags(strange)}")
    return make(**{name: value for name, value in known.items() if name in parameters}, **chosen)


def _flags(names: Sequence[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)
