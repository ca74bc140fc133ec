"""Which ranks share a host, and how fast the links are inside a host and between hosts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from .arrays import Ints


@dataclass(frozen=True)
class Link:
    """The links of one level.

    Attributes:
        bytes_per_second: that a rank sends, and as many that it receives meanwhile.
        latency_seconds: time before the first byte of an exchange arrives.
    """

    bytes_per_second: float
    latency_seconds: float


# Two H200s over NVLink, one-sided writes; and 400 Gbit/s a GPU between hosts, with NCCL's latency.
NVLINK = Link(390e9, 12e-6)
INFINIBAND = Link(50e9, 48e-6)


@dataclass(frozen=True)
class Topology:
    """The hosts of a group. Ranks are counted host by host.

    Attributes:
        hosts: ranks of each host; hosts may differ.
        levels: links inside a host, and between hosts.
    """

    hosts: tuple[int, ...]
    levels: tuple[Link, Link] = (NVLINK, INFINIBAND)

    @cached_property
    def size(self) -> int:
        """Ranks of all hosts."""
        return sum(self.hosts)

    @cached_property
    def host_of(self) -> Ints:
        """int64[P]: the host of each rank."""
        return np.repeat(np.arange(len(self.hosts)), self.hosts)

    @cached_property
    def first_ranks(self) -> tuple[int, ...]:
        """The first rank of each host."""
        return tuple(accumulate(self.hosts[:-1], initial=0))
