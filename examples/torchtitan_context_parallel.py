"""A small decoder with torchtitan's inner attentions over the ranks of its context-parallel mesh.

``apply_cp_to_forward`` and ``prepare_context_parallel_input`` replace torchtitan's functions of the
same names; the page on frameworks lists all lines that change there. Inner attentions are those of
``shared.torchtitan_attention``, with the signatures of torchtitan 0.3.0, which itself needs GPUs. A
batch is some rows of packed documents ("varlen"), or of one document each ("sdpa"). Shows that
losses and weights are those of one process.

    python examples/torchtitan_context_parallel.py                  2 processes, packed documents
    python examples/torchtitan_context_parallel.py --attention sdpa
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
from shared.torchtitan_attention import ScaledDotProductAttention, VarlenAttention, VarlenMetadata
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from customized_ops.ring_attention.api.frameworks.torchtitan import (
    apply_cp_to_forward,
    prepare_context_parallel_input,
)


class Decoder(nn.Module):
    """An attention layer between an embedding and a linear head."""

    def __init__(self, attention: str, dim: int = 32, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.position = nn.Embedding(VOCAB_SIZE, dim), nn.Embedding(1024, dim)
        self.head_dim, head_dim = dim // heads, dim // heads
        self.sizes = [heads * head_dim, groups * head_dim, groups * head_dim]
        self.qkv, self.out = nn.Linear(dim, sum(self.sizes)), nn.Linear(dim, VOCAB_SIZE)
        kinds = {"sdpa": ScaledDotProductAttention, "varlen": VarlenAttention}
        self.inner_attention = kinds[attention]()

    def forward(self, tokens: Tensor, positions: Tensor, attention_masks: Any = None) -> Tensor:
        x = self.embed(tokens) + self.position(positions)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in self.qkv(x).split(self.sizes, -1))
        y = self.inner_attention(q, k, v, attention_masks=attention_masks, enable_gqa=True)
        return self.out(x + y.flatten(2))


def batch_of(text: PackedText, step: int, given: argparse.Namespace) -> tuple[Tensor, Tensor, dict]:
    """Inputs and labels [rows, tokens], and what torchtitan passes on to its model."""
    packed = given.attention == "varlen"
    each = [text.batch(step * given.rows + row, packed) for row in range(given.rows)]
    names = ("tokens", "targets", "position_ids")
    inputs, labels, positions = (torch.cat([getattr(b, name) for b in each]) for name in names)
    extra = {"positions": positions}
    if packed:
        starts = (positions.flatten() == 0).nonzero().flatten().int()
        ends = torch.cat([starts, torch.tensor([inputs.numel()], dtype=torch.int32)])
        longest = int(ends.diff().max())
        extra["attention_masks"] = VarlenMetadata(ends, ends, longest, longest)
    return inputs, labels, extra


def train(mesh: DeviceMesh | None, text: PackedText, given: argparse.Namespace) -> tuple:
    """The mean loss of each step, and the model."""
    model, losses = Decoder(given.attention).double(), []
    if mesh is not None:
        apply_cp_to_forward([model.inner_attention], mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(given.steps):
        inputs, labels, extra = batch_of(text, step, given)
        learnt = (labels != -100).sum()  # on all ranks
        if mesh is not None:
            whole, device = (inputs, labels, extra), torch.device("cpu")
            inputs, labels, extra = prepare_context_parallel_input(*whole, mesh, device)
        logits = model(inputs, **extra).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") / learnt
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.detach())
        for t in [] if mesh is None else [losses[-1], *(p.grad for p in model.parameters())]:
            dist.all_reduce(t, group=mesh.get_group())
        optimizer.step()
    return torch.stack(losses), model


def main(given: argparse.Namespace, device: torch.device) -> int:
    """Run on every rank; returns 0 if losses and weights are those of one process."""
    text = PackedText(load_documents(max_bytes=100_000), given.tokens)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    (losses, model), (expected, single) = train(mesh, text, given), train(None, text, given)
    if dist.get_rank() == 0:
        print(f"losses over {mesh.size()} ranks: {[round(x, 4) for x in losses.tolist()]}")
    pairs = zip(model.parameters(), single.parameters(), strict=True)
    weights = max((a.detach() - b.detach()).abs().max().item() for a, b in pairs)
    difference = (losses - expected).abs().max().item()
    failed = verdict("losses are those of one process", difference, 1e-10)
    return failed | verdict("so are the weights after the last step", weights, 1e-10)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--attention", choices=("varlen", "sdpa"), default="varlen")
    parser.add_argument("--ranks", type=count, default=2)
    parser.add_argument("--rows", type=count, default=2, help="of a batch")
    parser.add_argument("--tokens", type=count, default=128, help="of a row")
    parser.add_argument("--steps", type=count, default=3)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    on_ranks(lambda device: main(options, device), options.ranks, gpus=False)
