"""A small model with Megatron's core attention over the ranks of a context-parallel group.

``RingCoreAttention`` has the constructor and the call of Megatron-Core's
core attentions: tokens first, [s, b, h, d] to [s, b, h d]. ``get_batch_on_this_cp_rank`` cuts
tensors as Megatron's function of that name does: 2 P chunks, of which rank r gets chunk r and chunk
2 P - 1 - r, which is ``Layout.zigzag``. Megatron is not needed. Shows that the model over ranks has
the losses of one process.

    python examples/megatron_attention.py                   2 processes
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from shared.launch import count, on_ranks, verdict
from shared.text_corpus import VOCAB_SIZE, PackedText, load_documents
from torch import Tensor, nn

from customized_ops.ring_attention.api.frameworks.megatron import RingCoreAttention


def get_batch_on_this_cp_rank(batch: Mapping[str, Any], group: Any) -> dict[str, Any]:
    """This rank's tokens of each tensor [b, s, ...] ("attention_mask": [b, 1, s, s], its rows)."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)

    def own(name: str, whole: Tensor) -> Tensor:
        dim = 2 if name == "attention_mask" else 1
        if whole.shape[dim] % (2 * ranks):
            raise ValueError(f"{name}: {2 * ranks} does not divide dim {dim} of {whole.shape}")
        chunks = whole.chunk(2 * ranks, dim)
        return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], dim)

    return {name: None if t is None else own(name, t) for name, t in batch.items()}


class TinyModel(nn.Module):
    """An attention layer between an embedding and a linear head; tokens first inside."""

    def __init__(self, group: Any, dim: int = 32, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head_dim = nn.Embedding(VOCAB_SIZE, dim), dim // heads
        self.sizes = [heads * self.head_dim, groups * self.head_dim, groups * self.head_dim]
        self.qkv, self.out = nn.Linear(dim, sum(self.sizes)), nn.Linear(dim, VOCAB_SIZE)
        self.position = nn.Embedding(1024, dim)
        ranks = 1 if group is None else dist.get_world_size(group)
        config = SimpleNamespace(attention_dropout=0.0, context_parallel_size=ranks)
        groups_of = SimpleNamespace(cp=group)  # Megatron's ProcessGroupCollection
        self.core_attention = RingCoreAttention(
            config, 1, "causal", "self", pg_collection=groups_of
        )

    def forward(self, tokens: Tensor, position_ids: Tensor, labels: Tensor) -> Tensor:
        """Sum of the losses of these tokens."""
        x = (self.embed(tokens) + self.position(position_ids)).transpose(0, 1)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in self.qkv(x).split(self.sizes, -1))
        x = x + self.core_attention(q, k, v, None)
        return F.cross_entropy(self.out(x).flatten(0, 1), labels.T.flatten(), reduction="sum")


def train(group: Any, text: PackedText, steps: int, device: torch.device) -> Tensor:
    """The mean loss of each step."""
    model = TinyModel(group).double().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = torch.zeros(steps, dtype=torch.float64, device=device)
    for step in range(steps):
        whole = text.batch(step, packed=False)
        batch = {"tokens": whole.tokens, "labels": whole.targets}
        batch["position_ids"] = whole.position_ids
        if group is not None:
            batch = get_batch_on_this_cp_rank(batch, group)
        loss = model(**{name: t.to(device) for name, t in batch.items()}) / text.seq_len
        optimizer.zero_grad()
        loss.backward()
        losses[step] = loss.detach()
        if group is not None:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
    if group is not None:
        dist.all_reduce(losses, group=group)
    return losses


def main(given: argparse.Namespace, device: torch.device) -> int:
    """Run on every rank; returns 0 if the losses are those of one process."""
    text = PackedText(load_documents(max_bytes=100_000), given.tokens)
    cut = train(dist.group.WORLD, text, given.steps, device)
    alone = train(None, text, given.steps, device)
    if dist.get_rank() == 0:
        print(f"losses over {dist.get_world_size()} ranks: {[round(x, 4) for x in cut.tolist()]}")
    difference = (cut - alone).abs().max().item()
    return verdict("the losses are those of one process", difference, 1e-10)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=count, default=2)
    parser.add_argument("--tokens", type=count, default=256, help="in a batch")
    parser.add_argument("--steps", type=count, default=5)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    on_ranks(lambda device: main(options, device), options.ranks)
