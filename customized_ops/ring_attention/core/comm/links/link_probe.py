"""Measures how fast the links of a group are, with a few messages when its ranks first meet.

Plans need rates that are right within a factor of two or so. A measured rate replaces that of the
cost model only where the two differ by more than that, and is then rounded in steps of a fifth. So
plans of usual machines do not depend on what a probe happened to measure, and plans of others
hardly do.
(Two H200s: 3 ms for 284 to 440 GB/s over NVLink, 80 ms for 2.1 to 2.6 GB/s over sockets.)
"""

from __future__ import annotations

import math
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import torch

from ...plan.cost_model import CostModel
from ..messages import Comm

# Bytes of a message that shows how long it takes to start, and of one that shows the rate.
SMALL, LARGE = 1 << 12, 1 << 25
REPEATS = 4
# A rate of the cost model stays if it is off by no more than these. The measured latency
# includes the host that starts messages: over one NVLink 72 to 146 us, where plans assume 48.
OFF_BYTES, OFF_SECONDS = 2.0, 4.0


class Link(NamedTuple):
    """How fast messages of the slowest rank are: bytes per second each way, and seconds until the
    first of them arrive."""

    bytes_per_second: float
    seconds: float

    def unless_near(self, known: Link) -> Link:
        """``known``, but with what is quite different here replaced."""
        return Link(
            *(
                was if was / off <= found <= was * off else 2.0 ** (round(4 * math.log2(found)) / 4)
                for was, found, off in zip(known, self, (OFF_BYTES, OFF_SECONDS), strict=True)
            )
        )


class Links(NamedTuple):
    """The links of a group, inside hosts and between them; None where no two ranks have one."""

    inside: Link | None
    between: Link | None

    def in_place_of(self, costs: CostModel) -> CostModel:
        """``costs`` with these rates where they are quite different."""
        rates: dict[str, Any] = {}
        if self.inside is not None:
            inside = self.inside.unless_near(Link(costs.link_bytes, costs.step_seconds))
            rates |= {"link_bytes": inside.bytes_per_second, "step_seconds": inside.seconds}
        if self.between is not None:
            between = self.between.unless_near(Link(costs.between_bytes, costs.between_seconds))
            rates |= {"between_bytes": between.bytes_per_second, "between_seconds": between.seconds}
        return replace(costs, **rates)


def hosts_of(comm: Comm, costs: CostModel) -> tuple[int, ...]:
    """Number of ranks on each host."""
    return costs.topology.hosts if costs.topology is not None else (comm.size,)


def probed(comm: Comm, hosts: tuple[int, ...], device: torch.device) -> Links:
    """The links of this group as messages show them, the same on every rank. All ranks call this
    together."""
    inside = _probe(comm, device, _inside(hosts, comm.rank)) if max(hosts) > 1 else None
    between = _probe(comm, device, _between(hosts, comm.rank)) if len(hosts) > 1 else None
    return Links(inside, between)


Peers = tuple[int, int] | None  # to whom a rank sends, and from whom it receives


def _inside(hosts: tuple[int, ...], rank: int) -> Peers:
    """The next rank of the host, and the one before."""
    first = 0
    for ranks in hosts:
        if rank < first + ranks:
            place = rank - first
            there = first + (place + 1) % ranks, first + (place - 1) % ranks
            return there if ranks > 1 else None
        first += ranks
    raise AssertionError("a rank is on some host")


def _between(hosts: tuple[int, ...], rank: int) -> Peers:
    """The rank with the same place on the next host, and the one on the host before; None for a
    place that not all hosts have."""
    starts = [sum(hosts[:n]) for n in range(len(hosts))]
    host = max(n for n, start in enumerate(starts) if start <= rank)
    place = rank - starts[host]
    if place >= min(hosts):
        return None
    return starts[(host + 1) % len(hosts)] + place, starts[host - 1] + place


def _probe(comm: Comm, device: torch.device, peers: Peers) -> Link:
    seconds = [_seconds(comm, device, peers, count) for count in (SMALL, LARGE)]
    slowest = [max(each) for each in zip(*comm.all_gather_object(seconds), strict=True)]
    small, large = slowest
    return Link((LARGE - SMALL) / max(large - small, 1e-9), small)


def _seconds(comm: Comm, device: torch.device, peers: Peers, count: int) -> float:
    """Seconds of the fastest of a few messages of ``count`` bytes each way; 0 without peers."""
    if peers is None:
        return 0.0
    to, source = peers
    out, into = (torch.zeros(count, dtype=torch.uint8, device=device) for _ in range(2))
    times = []
    for _ in range(1 + REPEATS):
        started = perf_counter()
        comm.start({to: [out]}, {source: [into]})()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(perf_counter() - started)
    return min(times[1:])
