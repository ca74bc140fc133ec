"""Which ranks share a host."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from .arrays import Ints

SHOWN = 8  # the most hosts, and the most ranks of each, that a text lists


@dataclass(frozen=True)
class Topology:
    """The hosts of a group. Ranks are counted host by host.

    Attributes:
        hosts: number of ranks on each host; hosts may differ.
    """

    hosts: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", tuple(self.hosts))
        if not self.hosts or min(self.hosts) < 1:
            raise ValueError(f"a topology has one or more ranks of each host, got {self.hosts}")

    @cached_property
    def size(self) -> int:
        """Number of ranks on all hosts."""
        return sum(self.hosts)

    @cached_property
    def host_of(self) -> Ints:
        """int64[P]: the host of each rank."""
        return np.repeat(np.arange(len(self.hosts)), self.hosts)

    @property
    def relays(self) -> bool:
        """Whether there are several hosts, and one with several ranks. Then what several ranks of a
        host need can cross to it once."""
        return len(self.hosts) > 1 and max(self.hosts) > 1

    def __str__(self) -> str:
        """As :meth:`parse` reads it: ``8x4``, or ``4,4,2`` where hosts differ."""
        if len(set(self.hosts)) == 1:
            return f"{len(self.hosts)}x{self.hosts[0]}"
        return ",".join(map(str, self.hosts))

    @staticmethod
    def of(hosts: Sequence[Hashable]) -> Topology | None:
        """The topology of ranks, from the host of each, by any name. None where there is one host,
        or where ranks of a host are not consecutive: then all links are treated as alike."""
        runs = [len(list(same)) for _, same in groupby(hosts)]
        return Topology(tuple(runs)) if 1 < len(runs) == len(set(hosts)) else None

    @staticmethod
    def interleaved(hosts: Sequence[Hashable], ranks: Sequence[int]) -> str:
        """The hosts and their ranks as text, ``a: ranks 0, 2; b: ranks 1, 3``, where the ranks
        of a host are not consecutive; "" where they are.

        Args:
            hosts: the host of each rank, by any name.
            ranks: the number by which each rank is shown.
        """
        of_host: dict[Hashable, list[int]] = {}
        for host, rank in zip(hosts, ranks, strict=True):
            of_host.setdefault(host, []).append(rank)
        if len(of_host) == len(list(groupby(hosts))):
            return ""
        each = [f"{host}: ranks {_first(own, ', ')}" for host, own in of_host.items()]
        return _first(each, "; ")

    @staticmethod
    def torn(hosts: Sequence[Hashable], machines: Sequence[str], ranks: Sequence[int]) -> str:
        """The first of several machines whose ranks are on several ``hosts``, and these ranks, as
        text; "" where there is none. A single machine may be given as several hosts.

        Args:
            hosts: the host of each rank, as it was given.
            machines: the name of the machine that each rank runs on.
            ranks: the number by which each rank is shown.
        """
        for machine in dict.fromkeys(machines) if len(set(machines)) > 1 else ():
            here = [n for n, name in enumerate(machines) if name == machine]
            if len({hosts[n] for n in here}) > 1:
                return f"ranks {_first([ranks[n] for n in here], ', ')} of machine {machine}"
        return ""

    @staticmethod
    def parse(text: str, name: str = "hosts") -> Topology:
        """Hosts from text: ``8x4`` is 8 hosts of 4 ranks, and ``4,4,2`` lists the number of ranks
        on each. A number alone is refused: it could be the number of hosts or of ranks.

        Args:
            name: what the text comes from, for errors.
        Raises:
            ValueError: the text has neither form.
        """
        try:
            if "," in text:
                hosts = tuple(map(int, text.split(",")))
            else:
                count, each = map(int, text.split("x"))
                hosts = (each,) * count
            return Topology(hosts)
        except ValueError:
            raise ValueError(
                f"{name}: hosts are given as 8x4 (hosts x ranks) or 4,4,2, not {text!r}"
            ) from None


def _first(values: Sequence[object], between: str) -> str:
    """The first SHOWN values as text."""
    shown = [str(value) for value in values[:SHOWN]]
    return between.join(shown + ["..."] * (len(values) > SHOWN))
