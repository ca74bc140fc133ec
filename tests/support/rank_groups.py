"""Groups of ranks for jobs: of all ranks or of some, several side by side, over messages or over
symmetric memory; and what a rank computes on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from ranks import Pool

from customized_ops.ring_attention.core.comm.comm_groups import comm_by_name
from customized_ops.ring_attention.core.comm.dist_comm import COSTS, HOSTS, DistComm
from customized_ops.ring_attention.core.comm.one_sided.symmetric import CHOICE, SymmetricComm

Rows = tuple[tuple[int, ...], ...]

in_their_own_time = mock.patch.dict(os.environ, {"SEQSHARD_CHECK": "0"})


@dataclass(frozen=True)
class Groups:
    """Groups side by side, which know nothing of each other.

    Attributes:
        rows: the global ranks of each group; no rank is in two, and some may be in none.
        comm: how a group's ranks are connected: "nccl" (gloo, for CPUs) or "symmetric"; "2,2" as
            if on two hosts of two, and no rank holds more than half a shard of others' keys; or
            "ranks", where ops are told the global ranks and make the group themselves.
        purpose: groups of another purpose are other groups.
    """

    rows: Rows
    comm: str = "nccl"
    purpose: str = ""


@dataclass(frozen=True)
class Place:
    """Where this rank stands: which row, which rank of how many, and the group to name to an op."""

    row: int
    rank: int
    size: int
    group: Any


@cache
def place_in(groups: Groups) -> Place | None:
    """This rank's place, None where it is in no group; all ranks of the world ask together."""
    told = groups.comm == "ranks"
    made = [list(row) if told else dist.new_group(list(row)) for row in groups.rows]
    here = dist.get_rank()
    for n, row in enumerate(groups.rows):
        if here in row:
            if not told:
                _connect(made[n], groups.comm)
            return Place(n, row.index(here), len(row), made[n])
    return None


def _connect(group: dist.ProcessGroup, kind: str) -> None:
    told = {CHOICE: kind}
    if "," in kind:
        told = {CHOICE: "nccl", HOSTS: kind, COSTS: "held_shards=0.5"}
    with mock.patch.dict(os.environ, told):
        comm = comm_by_name(group.group_name)
    assert (comm.costs.topology is not None) == ("," in kind)
    symmetric = kind == "symmetric" and dist.get_backend(group) == "nccl"
    assert type(comm) is (SymmetricComm if symmetric else DistComm)


def whole(size: int) -> Rows:
    """One row, of all ranks."""
    return (tuple(range(size)),)


def rows_of(size: int, width: int) -> Rows:
    """Rows of a mesh of ``size // width`` x ``width`` ranks."""
    return tuple(tuple(range(n, n + width)) for n in range(0, size, width))


def columns_of(size: int, width: int) -> Rows:
    """Columns of that mesh."""
    return tuple(tuple(range(n, size, width)) for n in range(width))


def comms(pool: Pool) -> Sequence[str]:
    """The ways in which ranks of a pool may be connected."""
    if pool.backend == "gloo":
        return ("nccl",)
    reach = all(torch.cuda.can_device_access_peer(0, n) for n in range(1, pool.size))
    return ("nccl", "symmetric") if reach else ("nccl",)


def device_of(pool: Pool) -> str:
    """What the ranks of a pool compute on."""
    return "cuda" if pool.backend == "nccl" else "cpu"


def device() -> str:
    """What this rank computes on; outside of any group the CPU."""
    return "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"
