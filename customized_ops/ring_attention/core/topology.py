"""Which ranks share a host."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from .arrays import Ints

SHOWN = 8  # hosts, and ranks of each, that a text shows


@dataclass(frozen=True)
class Topology:
    """The hosts of a group. Ranks are counted host by host.

    Attributes:
        hosts: ranks of each host; hosts may differ.
    """

    hosts: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", tuple(self.hosts))
        if not self.hosts or min(self.hosts) < 1:
            raise ValueError(f"a topology has one or more ranks of each host, got {self.hosts}")

    @cached_property
    def size(self) -> int:
        """Ranks of all hosts."""
        return sum(self.hosts)

    @cached_property
    def host_of(self) -> Ints:
        """int64[P]: the host of each rank."""
        return np.repeat(np.arange(len(self.hosts)), self.hosts)

    @property
    def relays(self) -> bool:
        """Whether there are several hosts, one of several ranks: what crosses can cross once."""
        return len(self.hosts) > 1 and max(self.hosts) > 1

    def __str__(self) -> str:
        """As :meth:`parse` reads it: ``8x4``, or ``4,4,2`` where hosts differ."""
        if len(set(self.hosts)) == 1:
            return f"{len(self.hosts)}x{self.hosts[0]}"
        return ",".join(map(str, self.hosts))

    @staticmethod
    def of(hosts: Sequence[Hashable]) -> Topology | None:
        """From the host of each rank, by any name; None where there is one, or where its ranks do
        not follow one another: then links count as alike."""
        runs = [len(list(same)) for _, same in groupby(hosts)]
        return Topology(tuple(runs)) if 1 < len(runs) == len(set(hosts)) else None

    @staticmethod
    def interleaved(hosts: Sequence[Hashable], ranks: Sequence[int]) -> str:
        """The hosts and their ranks as text, ``a: ranks 0, 2; b: ranks 1, 3``, where ranks of one
        host do not follow one another; "" where they do.

        Args:
            hosts: of each rank, by any name.
            ranks: what each is called.
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
        """The first of several machines that has ranks of several ``hosts``, and these ranks, as
        text; "" where there is none. All ranks on one machine may count as on several hosts.

        Args:
            hosts: of each rank, as it was given.
            machines: the name of that which it runs on.
            ranks: what each is called.
        """
        for machine in dict.fromkeys(machines) if len(set(machines)) > 1 else ():
            here = [n for n, name in enumerate(machines) if name == machine]
            if len({hosts[n] for n in here}) > 1:
                return f"ranks {_first([ranks[n] for n in here], ', ')} of machine {machine}"
        return ""

    @staticmethod
    def parse(text: str, name: str = "hosts") -> Topology:
        """Hosts from text: ``8x4`` is 8 hosts of 4 ranks, ``4,4,2`` lists the ranks of each. A
        number alone is neither: it could be of hosts or of ranks.

        Args:
            name: of what the text is from, for errors.
        Raises:
            ValueError: it is neither.
        """
        try:
            if "," in text:
                hosts = tuple(map(int, text.split(",")))
            else:
                count, each = map(int, text.split("x"))
                hosts = (each,) * count
        except ValueError:
            hosts = ()
        if not hosts or min(hosts) < 1:
            raise ValueError(
                f"{name}: hosts are given as 8x4 (hosts x ranks) or 4,4,2, not {text!r}"
            )
        return Topology(hosts)


def _first(values: Sequence[object], between: str) -> str:
    """The first of them as text."""
    shown = [str(value) for value in values[:SHOWN]]
    return between.join(shown + ["..."] * (len(values) > SHOWN))
