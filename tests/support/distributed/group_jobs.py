"""Calls with groups that leave a rank out, and messages of ranks that count as on several hosts.
See ``ranks.Pool``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from customized_ops.ring_attention import GroupError, wrap_ring_attn_func
from customized_ops.ring_attention.core.comm.comm_groups import comm_by_name
from customized_ops.ring_attention.core.comm.dist_comm import HOSTS
from customized_ops.ring_attention.core.comm.one_sided.symmetric import CHOICE
from customized_ops.ring_attention.core.comm.ways.way import abort


def outside() -> str:
    """What a call says on this rank, with a group that ``new_group`` made for the others."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    made = [dist.new_group([n for n in ranks if n != left_out]) for left_out in ranks]
    q = torch.zeros(1, 4, 2, 8)
    try:
        wrap_ring_attn_func(q, q, q, process_group=made[rank])
    except GroupError as error:
        return str(error)
    return "nothing"


def messages_apart(members: Sequence[int], hosts: str) -> tuple[list[int], list[int]]:
    """Of a rank of the group ``members``, over groups as those that GPUs have where the world is on
    these hosts: the peers of each, and what came from every other rank, from the first on."""
    group = dist.new_group(list(members))
    if dist.get_rank() not in members:
        return [], []
    with mock.patch.dict(os.environ, {HOSTS: hosts}):
        comm: Any = comm_by_name(group.group_name)
    comm._of_cpus = comm.ways_apart()
    for way in comm._of_cpus:
        way.introduce(comm.rank, torch.device("cpu"))
    peers = [peer for peer in range(comm.size) if peer != comm.rank]
    send = {peer: [torch.tensor([10 * comm.rank + peer])] for peer in peers}
    receive = {peer: [torch.zeros(1, dtype=torch.int64)] for peer in peers}
    comm.start(send, receive)()
    carried = [peer for way in comm._of_cpus for peer in way.peers if peer != comm.rank]
    return carried, [int(receive[peer][0]) for peer in peers]


def messages_by_nccl(by_torch: int, hosts: str) -> tuple[bool, list[list[int]], str]:
    """Of messages that NCCL's own functions pass, but torch on the rank ``by_torch``: whether this
    rank called them, what came from every peer, in two batches, and the error after an abort."""
    with mock.patch.dict(os.environ, {CHOICE: "nccl"} | ({HOSTS: hosts} if hosts else {})):
        comm: Any = comm_by_name(dist.new_group(range(dist.get_world_size())).group_name)
    if comm.rank == by_torch:
        comm._of_gpus = [way._replace(queue=None) for way in comm._of_gpus]
    peers = [peer for peer in range(comm.size) if peer != comm.rank]
    device = torch.device("cuda", torch.cuda.current_device())
    came = []
    for batch in range(2):
        here, wide = 100 * comm.rank + batch, (1 << 20) + comm.rank
        sizes = (1, wide)
        send = {p: [torch.full((n,), float(here + n), device=device) for n in sizes] for p in peers}
        receive = {p: [torch.zeros(n, device=device) for n in (1, (1 << 20) + p)] for p in peers}
        comm.start(send, receive)()
        del send
        came.append([int((t - t.numel()).unique().item()) for p in peers for t in receive[p]])
    called = all(way.queue is not None and not way.queue.kept for way in comm._of_gpus)
    abort(comm._of_gpus)
    try:
        comm.start({p: [torch.zeros(1, device=device)] for p in peers}, {})
    except RuntimeError as error:
        return called, came, str(error)
    return called, came, "nothing"
