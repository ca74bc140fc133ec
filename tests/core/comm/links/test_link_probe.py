"""How fast links are, found by messages."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from customized_ops.ring_attention.core.comm import Comm
from customized_ops.ring_attention.core.comm.inprocess import InProcessComm, run_ranks
from customized_ops.ring_attention.core.comm.links import link_probe
from customized_ops.ring_attention.core.comm.links.link_probe import hosts_of, probed
from customized_ops.ring_attention.core.cost import H200, CostModel
from customized_ops.ring_attention.core.topology import Topology

CPU = torch.device("cpu")


SHARED: set[tuple[int, int]] = set()  # pairs of ranks whose two ways share a rate


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], float]:
    """Bytes a second from rank to rank, 1e9 where not set, by a clock of each rank that only
    messages move. One takes 1 ms before."""
    rates: dict[tuple[int, int], float] = {}
    SHARED.clear()
    start, clock = InProcessComm.start, threading.local()

    def timed(self, send, receive):
        wait = start(self, send, receive)
        ways = [
            (pair in SHARED, sum(m.nbytes for m in messages) / rates.get(pair, 1e9))
            for pairs in (
                {(self.rank, peer): messages for peer, messages in send.items()},
                {(peer, self.rank): messages for peer, messages in receive.items()},
            )
            for pair, messages in pairs.items()
        ]
        seconds = [each for _, each in ways]
        together = sum(seconds) if any(shared for shared, _ in ways) else max(seconds, default=0.0)
        clock.now = now() + 1e-3 + together
        return wait

    def now() -> float:
        return getattr(clock, "now", 0.0)

    monkeypatch.setattr(InProcessComm, "start", timed)
    monkeypatch.setattr(link_probe, "perf_counter", now)
    return rates


def measured(comm: Comm, costs: CostModel) -> CostModel:
    return probed(comm, hosts_of(comm, costs), CPU).in_place_of(costs)


def test_one_host(links: dict[tuple[int, int], float]) -> None:
    found = run_ranks(3, lambda comm: measured(comm, H200))
    assert len(set(found)) == 1
    costs = found[0]
    assert (costs.link_bytes, costs.step_seconds) == (2.0**30, 2.0**-10)
    assert (costs.between_bytes, costs.call_seconds) == (H200.between_bytes, H200.call_seconds)


@pytest.mark.thin(2)
@pytest.mark.parametrize("hosts", [(2, 2), (2, 3), (1, 1, 2), (1, 1)])
def test_hosts(links: dict[tuple[int, int], float], hosts: tuple[int, ...]) -> None:
    of = Topology(hosts).host_of
    ranks = range(len(of))
    links.update({(a, b): 2.5e8 for a in ranks for b in ranks if of[a] != of[b]})
    given = replace(H200, topology=Topology(hosts))
    found = run_ranks(len(of), lambda comm: measured(comm, given))
    assert len(set(found)) == 1
    assert found[0].between_bytes == 2.0**28
    if max(hosts) == 1:
        assert found[0].link_bytes == H200.link_bytes
    else:
        assert found[0].link_bytes == 2.0**30


@pytest.mark.thin(5)
@pytest.mark.parametrize("hosts", [(2, 2), (2, 3), (1, 1, 2), (1, 1), (2, 2, 2)])
def test_ways_that_share_their_link(
    links: dict[tuple[int, int], float], hosts: tuple[int, ...]
) -> None:
    """Between hosts as many bytes one way as both ways together; inside ways are independent."""
    of = Topology(hosts).host_of
    ranks = range(len(of))
    links.update({(a, b): 5e8 for a in ranks for b in ranks if of[a] != of[b]})
    SHARED.update(links)
    given = replace(H200, topology=Topology(hosts))
    found = run_ranks(len(of), lambda comm: measured(comm, given))
    assert len(set(found)) == 1
    assert (found[0].between_bytes, found[0].between_alone) == (2.0**28, 2.0)
    assert found[0].link_alone == 1.0


@pytest.mark.parametrize(
    ("hosts", "slow"),
    [
        ((4,), [(1, 2), (2, 1), (3, 0), (0, 3)]),  # fast pairs, slow between them
        ((3,), [(1, 2), (2, 1), (2, 0), (0, 2)]),
        ((1, 1), [(1, 0)]),
        ((1, 1, 1), [(1, 2), (2, 1), (2, 0), (0, 2)]),
    ],
)
def test_links_that_differ_share_no_ways(
    links: dict[tuple[int, int], float], hosts: tuple[int, ...], slow: list[tuple[int, int]]
) -> None:
    """What is slow both ways at once is compared with itself one way."""
    links.update(dict.fromkeys(slow, 1e8))
    given = replace(H200, topology=Topology(hosts) if len(hosts) > 1 else None)
    found = run_ranks(sum(hosts), lambda comm: measured(comm, given))
    assert len(set(found)) == 1
    assert (found[0].link_alone, found[0].between_alone) == (1.0, 1.0)
    assert min(found[0].link_bytes, found[0].between_bytes) < 2e8


@pytest.mark.parametrize("slow", [1e8, 1e11])
def test_writes_into_memory(monkeypatch: pytest.MonkeyPatch, slow: float) -> None:
    """The slowest pair counts, where its rate is quite different from the cost model's; every byte
    is written."""
    clock, copy = threading.local(), torch.Tensor.copy_

    def timed(into: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        rate = slow if clock.rank == 2 else 2e11
        clock.now = now() + 1e-5 + into.nbytes / rate
        return copy(into, source)

    def now() -> float:
        return getattr(clock, "now", 0.0)

    def of_rank(comm: Comm) -> CostModel:
        clock.rank = comm.rank
        mine = torch.ones(link_probe.LARGE, dtype=torch.uint8)
        memory = comm.all_gather_object(mine)
        costs = link_probe.written(comm, memory, H200, CPU).in_place_of(H200)
        comm.all_gather_object("written")
        assert not mine.any()
        return costs

    monkeypatch.setattr(link_probe, "perf_counter", now)
    monkeypatch.setattr(torch.Tensor, "copy_", timed)
    found = run_ranks(3, of_rank)
    rate = 2.0 ** (round(4 * math.log2(slow)) / 4)
    assert found == [replace(H200, link_bytes=rate)] * 3


def test_a_rank_that_cannot_write_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_rank(comm: Comm) -> str:
        memory = comm.all_gather_object(torch.ones(link_probe.LARGE, dtype=torch.uint8))
        if comm.rank == 1:
            memory[2] = memory[2][:0]  # and so nothing fits
        with pytest.raises(RuntimeError) as raised:
            link_probe.written(comm, memory, H200, CPU)
        return str(raised.value)

    monkeypatch.setattr(link_probe, "_fastest", lambda move, _: 1.0 / bool(move().numel()))
    said = run_ranks(3, of_rank)
    assert said == ["links could not be measured: ZeroDivisionError: float division by zero"] * 3


def test_usual_rates_stay(links: dict[tuple[int, int], float]) -> None:
    known = CostModel(link_bytes=7e8, step_seconds=3e-3)
    assert run_ranks(2, lambda comm: measured(comm, known)) == [known] * 2


def test_rates_as_text() -> None:
    assert H200.with_rates("", "here") == H200
    found = H200.with_rates("link_bytes=2e9,held_shards=8", "here")
    assert found == replace(H200, link_bytes=2e9, held_shards=8.0)


@pytest.mark.parametrize(
    "text", ["speed=1", "link_bytes", "link_bytes=fast", "link_bytes=0", "topology=8", "=", "x=1,"]
)
def test_wrong_rates(text: str) -> None:
    with pytest.raises(ValueError, match="SEQSHARD_COSTS gives numbers above 0"):
        H200.with_rates(text, "SEQSHARD_COSTS")


def test_a_host_that_is_held_up_does_not_make_links_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small message that takes as long as a large one says nothing of what the rest took; one
    that takes long once is measured again."""

    def found(held_up: Callable[[int], bool]) -> link_probe.Link:
        """The link, where these of the measurements, four in a round, take 1 ms more."""
        turns = threading.local()

        def seconds(comm: Comm, device: torch.device, *rest: Any) -> float:
            turns.n = getattr(turns, "n", -1) + 1
            return 5e-5 + 1e-3 * held_up(turns.n) + rest[-1] / 100e9

        monkeypatch.setattr(link_probe, "_seconds", seconds)
        (link, _), _ = run_ranks(2, lambda comm: probed(comm, (2,), CPU))
        assert link is not None
        return link

    link = found(lambda n: n < 8)  # the round that connects, and one more
    assert link.bytes_per_second == pytest.approx(100e9, rel=0.01) and link.seconds < 1e-4
    link = found(lambda n: n % 4 == 0)  # small messages, always
    assert link.bytes_per_second < 2.01 * 100e9 and link.seconds < 1e-3
