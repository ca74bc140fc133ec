"""FSDP2 and context parallelism on one 2-D mesh: weights sharded over all ranks, text over some.

Rows of a batch are distributed over the mesh's "dp", tokens of a row over its "cp", in zigzag
shards. ``fully_shard`` shards the weights over all ranks of the mesh. Ranks that share a row have
different tokens, so their gradients are added up like those of different rows. Shows that the loss
curve is that of one process.

    python examples/fsdp2_context_parallel.py               4 processes, 2 x 2
    python examples/fsdp2_context_parallel.py --dp 1 --cp 2
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from shared.launch import count, on_ranks, verdict
from shared.text_corpus import VOCAB_SIZE, PackedText, load_documents
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from customized_ops.ring_attention import Layout, wrap_zigzag_attn_func


class Block(nn.Module):
    """Attention and an MLP over ``x`` [b, l, dim]; if a group is given, l is cut over it."""

    def __init__(self, dim: int, heads: int, groups: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.sizes = [heads * self.head_dim, groups * self.head_dim, groups * self.head_dim]
        self.norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, sum(self.sizes), bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, group: Any, layout: Layout) -> Tensor:
        split = self.qkv(self.norm(x)).split(self.sizes, -1)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in split)
        y = wrap_zigzag_attn_func(q, k, v, process_group=group, layout=layout)
        x = x + self.out(y.flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """A byte-level language model with learned positions."""

    def __init__(self, layers: int = 2, dim: int = 32, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB_SIZE, dim), nn.Embedding(1024, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, groups) for _ in range(layers))
        self.head = nn.Linear(dim, VOCAB_SIZE)

    def forward(
        self, tokens: Tensor, targets: Tensor, position_ids: Tensor, group: Any, layout: Layout
    ) -> Tensor:
        """Sum of the losses of these tokens."""
        x = self.embed(tokens) + self.position(position_ids)
        for block in self.blocks:
            x = block(x, group, layout)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="sum")


def batch_of(text: PackedText, step: int, rows: int) -> dict[str, Tensor]:
    """``rows`` stretches of text: each [rows, tokens]."""
    each = [text.batch(step * rows + row, packed=False) for row in range(rows)]
    names = ("tokens", "targets", "position_ids")
    return {name: torch.cat([getattr(one, name) for one in each]) for name in names}


def train(
    mesh: DeviceMesh | None, text: PackedText, given: argparse.Namespace, device: torch.device
) -> Tensor:
    """The mean loss of each step, over a mesh or, without one, in this process alone."""
    torch.manual_seed(0)
    model, losses = Model().double().to(device), []
    group, parts, own = None, 1, slice(None)
    if mesh is not None:
        everyone = init_device_mesh(device.type, (mesh.size(),))
        for each in (*model.blocks, model):
            fully_shard(each, mesh=everyone)
        group, parts = mesh["cp"].get_group(), mesh["cp"].size()
        own = slice(mesh["dp"].get_local_rank(), None, mesh["dp"].size())
    layout = Layout.zigzag(text.seq_len, parts)
    rank = 0 if mesh is None else mesh["cp"].get_local_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(given.steps):
        batch = batch_of(text, step, given.rows)
        mine = {name: layout.shard(t[own], rank).to(device) for name, t in batch.items()}
        share = model(**mine, group=group, layout=layout) / batch["tokens"].numel()
        # FSDP averages gradients over the ranks, but those of shares of a sum must be added up.
        (share * (1 if mesh is None else mesh.size())).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(share.detach())
    curve = torch.stack(losses)
    if mesh is not None:
        dist.all_reduce(curve)
    return curve


def main(given: argparse.Namespace, device: torch.device) -> int:
    """Run on every rank; returns 0 if the loss curve falls, and is that of one process."""
    text = PackedText(load_documents(max_bytes=100_000), given.tokens)
    mesh = init_device_mesh(device.type, (given.dp, given.cp), mesh_dim_names=("dp", "cp"))
    curve = train(mesh, text, given, device)
    alone = train(None, text, given, device)
    if dist.get_rank() == 0:
        print(f"losses on {given.dp} x {given.cp} ranks: {[round(x, 4) for x in curve.tolist()]}")
    falls = verdict("the loss falls", max(0.0, (curve[-1] - curve[0]).item()), 0.0)
    difference = (curve - alone).abs().max().item()
    return falls | verdict("the loss curve is that of one process", difference, 1e-10)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dp", type=count, default=2, help="ranks that the rows are dealt over")
    parser.add_argument("--cp", type=count, default=2, help="ranks that each row is cut over")
    parser.add_argument("--rows", type=count, default=4, help="of a batch; a multiple of --dp")
    parser.add_argument("--tokens", type=count, default=128, help="of a row")
    parser.add_argument("--steps", type=count, default=5)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    on_ranks(lambda device: main(options, device), options.dp * options.cp)
