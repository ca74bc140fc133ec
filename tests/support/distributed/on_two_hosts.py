"""What each rank runs on two hosts of two ranks (``test_two_hosts``), started by torchrun: prints,
from rank 0, one JSON object of what it found."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from customized_ops.ring_attention import Layout, group_costs, make_plan, wrap_ring_attn_func
from customized_ops.ring_attention.core.comm.comm_groups import group_comm
from customized_ops.ring_attention.core.comm.links import link_probe
from customized_ops.ring_attention.core.mask import AttnMask

TOKENS, HEADS, DIM = 4096, (4, 4), 32


def crossed_bytes() -> int:
    """That this host has sent over the link to the other."""
    link = Path("/sys/class/net") / os.environ["GLOO_SOCKET_IFNAME"]
    return int((link / "statistics/tx_bytes").read_text())


def main() -> None:
    """Causal attention on zigzag shards in fp64: errors, bytes on the link, its rate."""
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    costs = group_costs(group)
    link_probe.LARGE = 1 << 20
    link_probe.REPEATS = 2
    comm = group_comm(group)
    links = link_probe.probed(comm, link_probe.hosts_of(comm, costs), torch.device("cpu"))
    measured = links.in_place_of(costs)
    draw = torch.Generator().manual_seed(0)
    layout = Layout.zigzag(TOKENS, dist.get_world_size())
    q, k, v = (torch.randn(1, TOKENS, h, DIM, generator=draw).double() for h in (*HEADS, HEADS[1]))
    mine = [layout.shard(t, rank).requires_grad_() for t in (q, k, v)]
    dist.barrier()
    before = crossed_bytes()
    out = wrap_ring_attn_func(*mine, causal=True, process_group=group, layout=layout)
    dist.barrier()
    forward = crossed_bytes() - before
    out.square().sum().backward()
    dist.barrier()
    whole = [t.requires_grad_() for t in (q, k, v)]
    one = wrap_ring_attn_func(*whole, causal=True)
    one.square().sum().backward()
    pairs = [(out, one), *((a.grad, b.grad) for a, b in zip(mine, whole, strict=True))]
    error = max((a - layout.shard(b, rank)).abs().max().item() for a, b in pairs)
    plan = make_plan(
        AttnMask.dense(TOKENS, causal=True), layout, heads=HEADS, team_size=None, costs=costs
    )
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, (error, forward))
    if rank == 0:
        key_bytes = 2 * HEADS[1] * DIM * 8 // plan.team_size
        found = {
            "topology": str(costs.topology),
            "relays": plan.relays,
            "error": max(error for error, _ in every),
            "crossed": every[0][1],
            "planned": int(plan.crossings[0].across[:2, 0].sum()) * key_bytes,
            "between_bytes": measured.between_bytes,
            "link_bytes": measured.link_bytes,
        }
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
