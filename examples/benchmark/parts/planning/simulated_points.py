"""What the simulator predicts for measured points: how far it is off, and why.

    python examples/benchmark/parts/planning/simulated_points.py

It needs no GPU. Shares are of the ideal, forward and backward together: the kernel's time for the
whole problem, divided by the ranks. So kernels' rates cancel out, and what remains is what a plan
adds to them. No constant is fitted to a point: rates are those of ``core/plan/cost_model.py``, both
for this package's own ops and for peers over NCCL. Points are those of the documentation's pages
whose plan is known.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

if __name__ == "__main__":  # also runs from a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).parents[4]))
    sys.path.insert(1, str(Path(__file__).parents[3]))

from benchmark.cases import K, Maker
from benchmark.ops import plan_of, recommended
from benchmark.show.text import markdown

from customized_ops.ring_attention import AttnMask, Layout, Plan, make_plan
from customized_ops.ring_attention.core.cost import H200, CostModel
from customized_ops.ring_attention.core.plan.cost_model import H200_NCCL
from customized_ops.ring_attention.core.plan.simulate import Timeline
from customized_ops.ring_attention.core.topology import Topology

TWO_GPUS = "benchmarks, two GPUs"
MACHINES = "README, medians of machines"
FOUR_GPUS = "benchmarks, one kernel for everybody"
HELD = "plans, several hosts"
LINKS = "plans, how fast links are"
LENGTHS = "Many hosts, over NCCL by length"
TWO_HOSTS = "Many hosts, two of two GPUs"
BY_NVLINK = "Many hosts, two over NVLink"
PUBLISHED = "published with MagiAttention, 8 H100s"
HEAD = ("case", "source", "measured", "simulated", "misfit", "why")

SHORT = "kernels have one rate here, and are slower with short documents and shards"
OLD_PLAN = "measured over an older plan, whose gradients came home in fp32"
OWN_RING = "presumably that ring corrects fp32 results in kernels of its own after each of 8 steps"
NO_RATE = "no one rate of sockets fits all cases of a machine"
BUSY_HOST = "presumably the host takes longer than its calls and batches as simulated"
# What the points were measured with: each message by calls of torch, packed and placed by itself.
OVER_NCCL = replace(H200_NCCL, batch_seconds=250e-6, message_seconds=0.0)
# An all-to-all is one call of NCCL, which packs nothing.
ALL_TO_ALL = replace(OVER_NCCL, batch_seconds=0.0)
# The rates of cuDNN's kernel as TransformerEngine calls it, causal at 32k (benchmarks, kernels).
TE = replace(OVER_NCCL, forward_flops=599e12, backward_flops=536e12)


@dataclass(frozen=True)
class Point:
    """A measurement: a share of the ideal in percent, ms, or TFLOP/s per rank."""

    case: str
    source: str
    unit: str
    measured: float
    simulated: float
    why: str = ""

    @property
    def misfit(self) -> float:
        """The error of the simulation, in percent."""
        return 100 * (self.simulated / self.measured - 1)

    def cells(self) -> list[str]:
        """The cells of its line in the table."""
        return [
            *(self.case, self.source, f"{self.measured:g} {self.unit}"),
            *(f"{self.simulated:.{0 if self.measured >= 100 else 1}f}", f"{self.misfit:+.0f}%"),
            self.why if abs(self.misfit) > 15 else "",
        ]


def share(plan: Plan, heads: tuple[int, int], costs: CostModel) -> float:
    """The share of the ideal, forward and backward together, in percent."""
    found = plan.simulate(*heads, costs=costs)
    ideal = found.rank_flops * (1 / costs.forward_flops + 2.5 / costs.backward_flops)
    return 100 * ideal / seconds(found)


def seconds(found: Timeline) -> float:
    """Seconds of forward and backward together."""
    return found.forward_seconds + found.backward_seconds


def of_cases(
    name: str,
    kind: str,
    measured: dict[int, float],
    why: str = "",
    *,
    source: str = TWO_GPUS,
    heads: tuple[int, int] = (32, 8),
    ranks: int = 2,
    contiguous: bool = False,
    costs: CostModel = H200,
    draws: int = 1,
    multiple: int = 16,
) -> Iterator[Point]:
    """Points of this package's op for cases of the benchmark, by thousands of tokens; each is the
    mean of ``draws`` draws of documents."""
    for thousands, percent in measured.items():
        found = []
        for seed in range(draws):
            case = Maker(heads, 128, seed, multiple).of(kind, thousands * K)
            layout = recommended(case, ranks, costs.topology)
            if contiguous:
                layout = Layout.contiguous(case.tokens, ranks)
            found.append(share(plan_of(case, layout, costs), heads, costs))
        yield Point(f"{name}, {thousands}k", source, "%", percent, mean(found), why)


def of_peers(
    name: str, measured: dict[int, float], costs: CostModel, **options: Any
) -> Iterator[Point]:
    """Peers' schemes over NCCL, two GPUs, causal, simulated by plans that do the same."""
    for thousands, percent in measured.items():
        plan = causal_plan(thousands * K, 2, (32, 8), costs, **options)
        found = share(plan, (32, 8), costs)
        yield Point(f"{name}, causal {thousands}k", TWO_GPUS, "%", percent, found)


def causal_plan(
    tokens: int, ranks: int, heads: tuple[int, int], costs: CostModel, **options: Any
) -> Plan:
    """A plan of zigzag shards in which owners of rows compute them."""
    layout = Layout.zigzag(tokens, ranks)
    given = {"assignment": "owner", "head_groups": 1, **options}
    return make_plan(AttnMask.causal(tokens), layout, heads=heads, costs=costs, **given)


def measured_here() -> Iterator[Point]:
    """Points of this package, by one-sided writes."""
    zigzag = {8: 87.0, 16: 92.0, 32: 97.0, 64: 97.0, 128: 98.0, 1024: 97.0}
    contiguous = {8: 84.0, 16: 90.0, 32: 95.0, 64: 97.0, 128: 97.0}
    yield from of_cases("causal, zigzag", "causal", zigzag)
    yield from of_cases("causal, contiguous", "causal", contiguous, contiguous=True)
    for heads, percent in (((64, 8), 98.0), ((16, 16), 96.0), ((16, 1), 94.0)):
        name = f"causal, {heads[0]}:{heads[1]} heads"
        yield from of_cases(name, "causal", {32: percent}, heads=heads)
    name, wide = "causal, 16:16 heads, contiguous", {16: 82.0, 32: 91.0}
    yield from of_cases(name, "causal", wide, OLD_PLAN, heads=(16, 16), contiguous=True)
    yield from of_cases("packed, balanced", "packed", {16: 90.0, 32: 98.0, 64: 96.0, 128: 100.0})
    shards = {16: 68.0, 32: 96.0, 64: 82.0, 128: 93.0}
    yield from of_cases("packed, contiguous", "packed", shards, OLD_PLAN, contiguous=True)
    yield from of_cases("window 4096", "window", {64: 92.0, 1024: 99.0})
    four = {"source": FOUR_GPUS, "heads": (64, 8), "ranks": 4}
    yield from of_cases("causal, 4 GPUs", "causal", {16: 86.0, 32: 96.0, 64: 100.0}, **four)
    yield from of_cases("window 4096, 4 GPUs", "window", {16: 78.0, 32: 86.0, 64: 94.0}, **four)
    yield from of_cases("packed, 4 GPUs", "packed", {16: 22.0, 32: 55.0, 64: 89.0}, SHORT, **four)


def medians_of_machines() -> Iterator[Point]:
    """Points of this package that are medians of several machines; packed ones of three draws."""
    given: dict[str, Any] = {"source": MACHINES}
    zigzag = {8: 81.0, 16: 91.0, 32: 95.0, 64: 96.0, 128: 98.0}
    wide = {8: 78.0, 16: 88.0, 32: 95.0, 64: 96.0, 128: 97.0}
    contiguous = {8: 81.0, 16: 91.0, 32: 94.0, 64: 96.0, 128: 97.0}
    packed = {16: 84.0, 32: 96.0, 64: 96.0, 128: 98.0}
    yield from of_cases("causal, zigzag", "causal", zigzag, **given)
    yield from of_cases("causal, 16:16, zigzag", "causal", wide, heads=(16, 16), **given)
    yield from of_cases("causal, contiguous", "causal", contiguous, contiguous=True, **given)
    yield from of_cases("packed, balanced", "packed", packed, draws=3, multiple=1, **given)


def measured_over_nccl() -> Iterator[Point]:
    """Points of peers and of this package, by messages."""
    ulysses = {8: 66.0, 16: 81.0, 32: 91.0, 64: 95.0, 128: 97.0}
    ring = {8: 64.0, 16: 77.0, 32: 89.0, 64: 94.0, 128: 96.0}
    yield from of_peers("Ulysses", ulysses, ALL_TO_ALL, stages=0, team_size=2)
    yield from of_peers("zigzag ring", ring, OVER_NCCL, stages=1)
    for shards, ms in ((math.inf, 390.1), (1.0, 398.8), (0.5, 398.8)):
        apart = {"topology": Topology((1, 1)), "between_bytes": OVER_NCCL.link_bytes}
        costs = replace(OVER_NCCL, held_shards=shards, **apart)
        plan = causal_plan(128 * K, 2, (32, 8), costs, head_groups=None)
        found = 1e3 * seconds(plan.simulate(costs=costs))
        yield Point(f"causal 128k, {shards:g} shards held", HELD, "ms", ms, found)
    # The rate that the group measured, and how much faster one way is alone on another machine.
    sockets = replace(OVER_NCCL, link_bytes=2.15e9, link_alone=1.41)
    shares_of = {
        ("packed", 64, False): (7.0 / 7.4, 6.4 / 29.1),
        ("packed", 64, True): (7.0 / 7.8, 6.4 / 8.4),
        ("causal", 128, False): (407 / 414, 404 / 412),
        ("causal", 128, True): (407 / 419, 404 / 606),
    }
    for (kind, thousands, contiguous), measured in shares_of.items():
        layout = "contiguous" if contiguous else "recommended"
        for name, costs, part in zip(
            ("NVLink", "sockets"), (OVER_NCCL, sockets), measured, strict=True
        ):
            yield from of_cases(
                *(f"{kind}, {layout}, NCCL over {name}", kind, {thousands: round(100 * part, 1)}),
                source=LINKS,
                costs=costs,
                contiguous=contiguous,
            )


def over_nccl_by_length() -> Iterator[Point]:
    """The recommended layouts on two H100s, by messages; packed points are of three draws. Causal
    8k over NVLink is the median of four machines."""
    nvlink = {
        "causal": {8: 62.5, 16: 89.9, 32: 92.3, 64: 96.2},
        "window": {16: 80.8, 32: 91.7, 64: 89.8},
        "packed": {16: 87.2, 32: 94.9, 64: 93.8},
    }
    sockets = {
        "causal": {8: 10.0, 16: 17.8, 32: 33.3, 64: 62.5},
        "window": {16: 18.2, 32: 38.3, 64: 88.7},
        "packed": {64: 29.8},
    }
    slow = replace(OVER_NCCL, link_bytes=2.15e9, link_alone=1.41)  # as the group measured them
    for name, measured, costs in (("NVLink", nvlink, OVER_NCCL), ("sockets", sockets, slow)):
        for kind, shares in measured.items():
            why = "" if costs is OVER_NCCL else NO_RATE
            draws = 3 if kind == "packed" else 1
            given: dict[str, Any] = {"costs": costs, "draws": draws, "multiple": 1}
            case = f"{kind}, NCCL over {name}"
            yield from of_cases(case, kind, shares, why, source=LENGTHS, **given)


def over_two_hosts() -> Iterator[Point]:
    """The recommended layouts on four H100s, where NCCL treats each pair as a host. There are three
    machines, with the rates that their groups measured; packed points are of three draws. How much
    faster one way is alone was measured on the third only."""
    machines = (
        (1.8e9, {32: 24.3, 64: 55.8, 128: 80.1}, {64: 18.7, 128: 71.2}),
        (1.8e9, {32: 28.6, 64: 57.0, 128: 86.6}, {64: 22.0, 128: 75.0}),
        (2.15e9, {32: 28.8, 64: 58.4, 128: 83.6}, {64: 19.2, 128: 74.8}),
    )
    for number, (rate, causal, packed) in enumerate(machines, 1):
        costs = replace(CostModel.over("2x2"), between_bytes=rate, between_alone=1.41)
        given: dict[str, Any] = {"costs": costs, "multiple": 1, "ranks": 4, "source": TWO_HOSTS}
        name = f"two hosts, machine {number}"
        yield from of_cases(f"causal, {name}", "causal", causal, NO_RATE, **given)
        yield from of_cases(f"packed, {name}", "packed", packed, NO_RATE, draws=3, **given)


def over_two_hosts_by_nvlink() -> Iterator[Point]:
    """Four H200s that only count as two hosts; the packed point is of two draws."""
    costs = replace(CostModel.over("2x2"), between_bytes=H200_NCCL.link_bytes)
    given: dict[str, Any] = {"costs": costs, "multiple": 1, "ranks": 4, "source": BY_NVLINK}
    yield from of_cases("causal", "causal", {8: 24.0, 16: 69.0, 32: 80.0}, BUSY_HOST, **given)
    yield from of_cases("causal, 16:16", "causal", {32: 64.0}, BUSY_HOST, heads=(16, 16), **given)
    yield from of_cases("packed", "packed", {32: (41.0 + 82.0) / 2}, BUSY_HOST, draws=2, **given)


def published() -> Iterator[Point]:
    """Published points: 64:8 heads of 128, 8k tokens per GPU, causal, one host; simulated by plans
    that do the same."""
    schemes: dict[str, tuple[CostModel, dict[str, int], tuple[float, float], str]] = {
        "Ulysses": (ALL_TO_ALL, {"stages": 0, "team_size": 8}, (602.0, 582.0), ""),
        "USP, 4 x 2": (OVER_NCCL, {"stages": 1, "team_size": 4}, (592.0, 572.0), ""),
        "TransformerEngine's ring": (TE, {"stages": 7}, (421.0, 432.0), OWN_RING),
    }
    for name, (costs, options, measured, why) in schemes.items():
        plan = causal_plan(64 * K, 8, (64, 8), costs, **options)
        found = plan.simulate(64, 8, costs=costs).tflops_per_rank
        for way, tflops, said in zip(("forward", "backward"), measured, found, strict=True):
            yield Point(f"{name}, {way}", PUBLISHED, "TFLOP/s", tflops, said, why)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """There are none."""
    return argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args(arguments)


def main() -> None:
    """Print the table."""
    parse()
    points = [*measured_here(), *medians_of_machines()]
    points += [*measured_over_nccl(), *over_nccl_by_length()]
    points += [*over_two_hosts(), *over_two_hosts_by_nvlink(), *published()]
    print(markdown(HEAD, [point.cells() for point in points], 2))
    for source in dict.fromkeys(point.source for point in points):
        off = sorted(abs(point.misfit) for point in points if point.source == source)
        within = sum(each <= 15 for each in off)
        print(f"{source}: {within} of {len(off)} within 15%, median {off[len(off) // 2]:.0f}%")


if __name__ == "__main__":
    main()
