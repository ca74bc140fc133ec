"""Measures how fast the links of a group are, with a few messages, or writes into one another's
memory, when its ranks first meet.

Plans need rates that are right within a factor of two or so. A measured rate replaces that of the
cost model only where the two differ by more than :data:`OFF`, and is then rounded in steps of a
fifth. So plans of usual machines do not depend on what a probe happened to measure, and plans of
others hardly do.
(This takes milliseconds over NVLink, and a fraction of a second over sockets.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import torch

from ...plan.cost_model import CostModel
from ..messages import Comm

# Bytes of a message that shows how long it takes to start, and of one that shows the rate.
SMALL, LARGE = 1 << 12, 1 << 25
REPEATS = 4
# Fast messages are measured in several rounds, because a busy host takes far longer now and then.
MOST_ROUNDS, ROUND_SECONDS = 8, 0.02
# What the cost model says of a Link stays if it is off by no more than these. The measured latency
# includes the host that starts messages: over one NVLink 72 to 146 us, where plans assume 48.
OFF = 2.0, 4.0, 1.25
# How many times as long as a small message a large one takes, at least, where its time says whether
# the ways of a link share it. Over NVLink most of it is the host's.
LONG = 8


class Link(NamedTuple):
    """How fast messages of the slowest rank are.

    Attributes:
        bytes_per_second: each way, while as many go the other way.
        seconds: until the first of them arrive.
        alone: how many times as many bytes go one way while none go the other, 1 to 2.
    """

    bytes_per_second: float
    seconds: float
    alone: float = 1.0

    def unless_near(self, known: Link) -> Link:
        """``known``, but with what is quite different here replaced."""
        return Link(
            *(
                was if was / off <= found <= was * off else 2.0 ** (round(4 * math.log2(found)) / 4)
                for was, found, off in zip(known, self, OFF, strict=True)
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
            known = Link(costs.link_bytes, costs.step_seconds, costs.link_alone)
            names = "link_bytes", "step_seconds", "link_alone"
            rates |= zip(names, self.inside.unless_near(known), strict=True)
        if self.between is not None:
            known = Link(costs.between_bytes, costs.between_seconds, costs.between_alone)
            names = "between_bytes", "between_seconds", "between_alone"
            rates |= zip(names, self.between.unless_near(known), strict=True)
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


def written(
    comm: Comm, memory: Sequence[torch.Tensor], costs: CostModel, device: torch.device
) -> Links:
    """The links of ranks of one host as writes into one another's memory show them, the same on
    every rank. All ranks call this together, and each writes to the next one. Only the rate is
    measured: writes start as late as ``costs`` say.

    Args:
        memory: of each rank, uint8[LARGE].
    Raises:
        RuntimeError: on every rank, if one could not write.
    """

    def seconds(count: int) -> float:
        return _fastest(lambda: into[:count].copy_(source[:count]), device)

    into = memory[(comm.rank + 1) % comm.size]
    comm.all_gather_object("ready")
    took, failure = 0.0, ""
    try:
        source = torch.zeros_like(into, device=device)
        took = seconds(LARGE) - seconds(SMALL)
    except Exception as error:  # whatever it is, the peers must not wait for this rank
        failure = f"{type(error).__name__}: {error}"
    failures, times = zip(*comm.all_gather_object((failure, took)), strict=True)
    if failure := next(filter(None, failures), ""):
        raise RuntimeError(f"links could not be measured: {failure}")
    return Links(Link((LARGE - SMALL) / max(*times, 1e-9), costs.step_seconds), None)


class Peers(NamedTuple):
    """To whom a rank sends, and from whom it receives, in a ring; ``place`` is the rank's in it."""

    to: int
    source: int
    place: int
    size: int

    def one_way(self, odd: bool) -> tuple[int | None, int | None]:
        """The same where ranks at odd places only send and the others only receive, or the other
        way round. In a ring of an odd size the last rank never sends to the first."""
        if self.place % 2 == odd:
            last_of_odd = self.place + 1 == self.size and self.size % 2 == 1
            return (None if last_of_odd else self.to), None
        first_of_odd = self.place == 0 and self.size % 2 == 1
        return None, (None if first_of_odd else self.source)


def _inside(hosts: tuple[int, ...], rank: int) -> Peers | None:
    """The ranks of its host, in a ring; None if it is alone."""
    first = 0
    for ranks in hosts:
        if rank < first + ranks:
            place = rank - first
            there = first + (place + 1) % ranks, first + (place - 1) % ranks
            return Peers(*there, place, ranks) if ranks > 1 else None
        first += ranks
    raise AssertionError("a rank is on some host")


def _between(hosts: tuple[int, ...], rank: int) -> Peers | None:
    """The ranks with the same place on each host, in a ring; None for a place that not all hosts
    have."""
    starts = [sum(hosts[:n]) for n in range(len(hosts))]
    host = max(n for n, start in enumerate(starts) if start <= rank)
    place = rank - starts[host]
    if place >= min(hosts):
        return None
    there = starts[(host + 1) % len(hosts)] + place, starts[host - 1] + place
    return Peers(*there, host, len(hosts))


def _probe(comm: Comm, device: torch.device, peers: Peers | None) -> Link:
    nobody = (None, None)
    both = nobody if peers is None else (peers.to, peers.source)
    halves = [nobody if peers is None else peers.one_way(odd) for odd in (False, True)]
    given = [(both, SMALL), (both, LARGE), *((half, LARGE) for half in halves)]

    def fastest() -> list[float]:
        return [_seconds(comm, device, *ways, count) for ways, count in given]

    slowest = max(comm.all_gather_object(sum(fastest())))
    rounds = int(min(max(ROUND_SECONDS / max(slowest, 1e-9), 1), MOST_ROUNDS))
    small, large, *one_way = map(min, zip(*(fastest() for _ in range(rounds)), strict=True))
    alone = large / max(one_way) if all(one_way) else 2.0  # of a rank that measured both
    every = comm.all_gather_object((small, large, -alone))
    small, large, alone = (max(each) for each in zip(*every, strict=True))
    shared = min(max(-alone, 1.0), 2.0) if large > LONG * small else 1.0
    # A host that was held up may have taken as long for few bytes as for many.
    start = min(small, large / 2)
    return Link((LARGE - SMALL) / max(large - start, 1e-9), start, shared)


def _seconds(
    comm: Comm, device: torch.device, to: int | None, source: int | None, count: int
) -> float:
    """Seconds of the fastest of a few messages of ``count`` bytes; 0 for a rank without peers."""
    if to is None and source is None:
        return 0.0
    out, into = (torch.zeros(count, dtype=torch.uint8, device=device) for _ in range(2))
    send, receive = {} if to is None else {to: [out]}, {} if source is None else {source: [into]}
    return _fastest(lambda: comm.start(send, receive)(), device)


def _fastest(move: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of a few moves of bytes, after a first one that is not counted."""
    times = []
    for _ in range(1 + REPEATS):
        started = perf_counter()
        move()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(perf_counter() - started)
    return min(times[1:])
