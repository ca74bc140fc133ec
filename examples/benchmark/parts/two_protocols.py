"""Attention over ranks, timed in two ways: calls in a row, as layers run, and one after a barrier.

    torchrun --nproc-per-node 2 examples/benchmark/parts/two_protocols.py --json a.json
    python examples/benchmark/parts/two_protocols.py --from-json a.json b.json c.json

A case is MASK:TOKENS:HEADS, such as ``causal:8k:32:8``, ``contiguous:8k``, ``window:64k`` or
``packed:16k``: causal over zigzag shards, causal over contiguous ones, a window of 4096, and
documents over ``Layout.balanced``, the mean of ``--draws`` draws. Each is a forward and a backward.

    in a row     20 of them are queued, and timed together on the device: what a host that is slower
                 than its device costs shows
    alone        ranks meet, wait for their devices, and make one: a host that is slow to launch
                 the first kernel shows as well

Shares are of half (with two ranks) the time of one device over the whole sequence, calls in a row,
measured in turn with them. Times are of the slowest rank: medians of the rounds except the first,
in which frequent passes become tapes and graphs. For several files, the median of these is shown
with their minimum and maximum. "host" is what it takes the host to
queue one of a row, in microseconds; for long calls, it waits for room in the queue.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))
    sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmark.cases import Case, Maker
from benchmark.command import heads, tokens
from benchmark.measure.timing import Marks
from benchmark.ops import Op, recommended
from benchmark.ranks import Ranks

from customized_ops.ring_attention import Layout, group_costs

CASES = (
    *(f"causal:{n}k:32:8" for n in (8, 16, 32, 64, 128)),
    *(f"causal:{n}k:16:16" for n in (8, 16, 32, 64, 128)),
    *(f"contiguous:{n}k:32:8" for n in (8, 16, 32, 64, 128)),
    *(f"packed:{n}k:32:8" for n in (16, 32, 64, 128)),
)
CALLS = 20  # in a row, or as many as fill ROW_SECONDS, but no fewer than 3
ROW_SECONDS = 0.5
PROTOCOLS = ("row", "alone", "host")
Passes = Callable[[], None]


class Times(NamedTuple):
    """Milliseconds of one round: one device, calls in a row; ranks in both ways; the host's."""

    single: float
    row: float
    alone: float
    host: float


def passes_of(attention: Callable[..., Tensor], shards: list[Tensor]) -> Passes:
    """A forward and a backward of an attention on fixed tensors."""
    *leaves, dout = shards

    def passes() -> None:
        torch.autograd.grad(attention(*leaves), leaves, dout)

    return passes


def in_a_row(passes: Passes, ranks: Ranks, calls: int) -> tuple[float, float]:
    """Milliseconds of one of ``calls`` that are queued together, and of the host to queue it."""
    ranks.together()
    ranks.wait()
    began, mark = perf_counter(), Marks(ranks.cuda)
    mark()
    for _ in range(calls):
        passes()
    mark()
    queued = 1e3 * (perf_counter() - began)
    ranks.wait()
    [whole] = mark.milliseconds()
    return whole / calls, queued / calls


def alone(passes: Passes, ranks: Ranks) -> float:
    """Milliseconds of one call that finds an idle device."""
    ranks.together()
    ranks.wait()
    began = perf_counter()
    passes()
    ranks.wait()
    return 1e3 * (perf_counter() - began)


def measure(
    case: Case, layout: Layout, ranks: Ranks, dtype: torch.dtype, rounds: int
) -> list[Times]:
    """The times of each round, of the slowest rank."""
    (h, g), d, size = case.heads, case.head_dim, layout.sizes[ranks.rank]

    def tensors(length: int) -> list[Tensor]:
        made = [
            torch.randn(1, length, n, d, dtype=dtype, device=ranks.device) for n in (h, g, g, h)
        ]
        return [t.requires_grad_() for t in made[:3]] + made[3:]

    rest = {"kernel": "auto"}
    single = passes_of(Op(case, layout, None, rest), tensors(case.tokens))
    shared = passes_of(Op(case, layout, ranks.group, rest), tensors(size))
    single()
    shared()
    calls = max(3, min(CALLS, int(1e3 * ROW_SECONDS / in_a_row(single, ranks, 2)[0])))
    calls = ranks.of_first(calls)
    found = []
    for _ in range(1 + rounds):
        one, _ = in_a_row(single, ranks, calls)
        row, queued = in_a_row(shared, ranks, calls)
        by_itself = median(alone(shared, ranks) for _ in range(calls))
        told = ranks.gather([one, row, by_itself, queued])
        singles, *others = zip(*told, strict=True)
        found.append(Times(min(singles), *map(max, others)))
    return found[1:]


def shares(times: list[Times], size: int) -> dict[str, Any]:
    """Shares of the ideal, by protocol, and the host's microseconds; medians of the rounds."""
    ideal = median(each.single for each in times) / size
    row, by_itself = median(t.row for t in times), median(t.alone for t in times)
    return {
        "row": ideal / row,
        "alone": ideal / by_itself,
        "host": 1e3 * median(t.host for t in times),
        "single_ms": ideal * size,
        "row_ms": row,
        "rounds": [[round(x, 4) for x in each] for each in times],
    }


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases here; returns the results by case."""
    ranks = Ranks(given.device)
    dtype = torch.bfloat16 if ranks.cuda else torch.float32
    found: dict[str, Any] = {}
    topology = group_costs(ranks.group).topology
    for name in given.cases:
        kind, length, *pair = name.split(":")
        of_heads = heads(":".join(pair)) if pair else (32, 8)
        draws = given.draws if kind == "packed" else 1
        results = []
        for seed in range(draws):
            maker = Maker(of_heads, given.head_dim, seed, 1)
            case = maker.of("causal" if kind == "contiguous" else kind, tokens(length))
            layout = recommended(case, ranks.size, topology)
            if kind == "contiguous":
                layout = Layout.contiguous(case.tokens, ranks.size)
            rounds = 1 if draws > 1 else given.rounds
            results.append(shares(measure(case, layout, ranks, dtype, rounds), ranks.size))
            if ranks.cuda:
                torch.cuda.empty_cache()
        numbers = [key for key in results[0] if key != "rounds"]
        found[name] = {key: mean(each[key] for each in results) for key in numbers}
        found[name]["rounds"] = [each["rounds"] for each in results]
        if draws > 1:
            found[name]["draws"] = [each["row"] for each in results]
        if ranks.rank == 0:
            print(line(name, [found[name]]), flush=True)
    if ranks.rank == 0 and given.json:
        given.json.write_text(json.dumps({"machine": machine(ranks), "cases": found}))
    ranks.gather("done")
    ranks.close()
    return found


def machine(ranks: Ranks) -> str:
    """The processors of this machine."""
    found = "unknown processor"
    for text in Path("/proc/cpuinfo").read_text().splitlines():
        if text.startswith("model name"):
            found = text.split(":", 1)[1].strip()
    return f"{torch.cuda.get_device_name()}, {found}" if ranks.cuda else found


def line(name: str, found: list[dict[str, Any]]) -> str:
    """A case's line: for each protocol the median and, for several files, the span."""
    cells = []
    for key in PROTOCOLS:
        values = [each[key] for each in found]
        least, middle, most = (
            f"{value:.0f} us" if key == "host" else f"{value:.1%}"
            for value in (min(values), median(values), max(values))
        )
        cells.append(middle if len(values) == 1 else f"{middle} ({least} to {most})")
    draws = [draw for each in found for draw in each.get("draws", ())]
    if draws:
        cells.append(f"draws {min(draws):.1%} to {max(draws):.1%}")
    return f"{name:>22}  " + "  ".join(
        f"{key} {cell:<28}" for key, cell in zip((*PROTOCOLS, ""), cells, strict=False)
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--cases", nargs="+", default=list(CASES), metavar="MASK:TOKENS[:Q:KV]")
    add("--head-dim", type=int, default=128)
    add("--rounds", type=int, default=3)
    add("--draws", type=int, default=10, help="of documents, one round each")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    add("--from-json", nargs="+", type=Path, help="measure nothing: medians of files")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, or show what was measured."""
    given = parse()
    if not given.from_json:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        run(given)
        return
    files = [json.loads(path.read_text()) for path in given.from_json]
    for file in files:
        print(file["machine"])
    for name in dict.fromkeys(name for file in files for name in file["cases"]):
        print(line(name, [file["cases"][name] for file in files if name in file["cases"]]))


if __name__ == "__main__":
    main()
