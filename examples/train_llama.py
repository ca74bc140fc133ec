"""Train a small Llama on real text, its sequence cut over several processes.

The model below is written for one device. Its attention calls a ``wrap_*_attn_func`` without a
group; ``parallelize`` does the rest. At the end the loss curve is compared with the same run on one
rank.

    python examples/train_llama.py                      2 processes, ring attention
    python examples/train_llama.py --nproc 4 --op varlen
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import start_ranks
from text_corpus import VOCAB_SIZE, Batch, PackedText, load_documents
from torch import Tensor, nn
from tqdm import tqdm

from annotations import ComputeConfig, parallelize
from customized_ops.ring_attention import (
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
    wrap_zigzag_attn_func,
)

TOLERANCE = 1e-4  # largest difference of the two loss curves


@dataclass(frozen=True)
class LlamaConfig:
    dim: int = 128
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    hidden: int = 352
    vocab: int = VOCAB_SIZE
    rope_base: float = 10_000.0
    op: str = "ring"


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE (Su et al., arXiv:2104.09864): x [b, l, h, d], cos and sin [b, l, 1, d / 2]."""
    a, b = x.chunk(2, dim=3)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=3)


class Attention(nn.Module):
    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.c, self.head_dim = c, c.dim // c.heads
        self.wq = nn.Linear(c.dim, c.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(c.dim, c.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(c.dim, c.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(c.heads * self.head_dim, c.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        b, length, _ = x.shape
        q = rotate(self.wq(x).view(b, length, self.c.heads, self.head_dim), cos, sin)
        k = rotate(self.wk(x).view(b, length, self.c.kv_heads, self.head_dim), cos, sin)
        v = self.wv(x).view(b, length, self.c.kv_heads, self.head_dim)
        if self.c.op == "ring":
            out = wrap_ring_attn_func(q, k, v, causal=True)
        elif self.c.op == "zigzag":
            out = wrap_zigzag_attn_func(q, k, v, causal=True)
        else:
            assert cu_seqlens is not None, "packed attention needs the documents' boundaries"
            out = wrap_ring_attn_varlen_func(
                q.squeeze(0), k.squeeze(0), v.squeeze(0), cu_seqlens, cu_seqlens, causal=True
            ).unsqueeze(0)
        return self.wo(out.reshape(b, length, -1))


class Block(nn.Module):
    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(c.dim), nn.RMSNorm(c.dim)
        self.attention = Attention(c)
        self.gate = nn.Linear(c.dim, c.hidden, bias=False)
        self.up = nn.Linear(c.dim, c.hidden, bias=False)
        self.down = nn.Linear(c.hidden, c.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, cu_seqlens)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Byte-level Llama with tied embeddings; ``forward`` returns the mean loss of its tokens."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(c.vocab, c.dim)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.dim)
        d = c.dim // c.heads
        inv_freq = c.rope_base ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
        self.register_buffer("inv_freq", inv_freq.float(), persistent=False)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        angles = (position_ids.unsqueeze(-1) * self.inv_freq).unsqueeze(2)
        x = self.embed(tokens)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin, cu_seqlens)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def inputs(batch: Batch, op: str) -> dict[str, Tensor]:
    given = {n: getattr(batch, n) for n in ("tokens", "targets", "position_ids")}
    return {**given, "cu_seqlens": batch.cu_seqlens} if op == "varlen" else given


def train(
    name: str,
    model: nn.Module,
    sync: Callable[[], None],
    text: PackedText,
    args: argparse.Namespace,
) -> list[float]:
    """Losses of ``args.steps`` steps; rank 0 shows a bar and the loss every 10 steps."""
    shown = dist.get_rank() == 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=1e-6)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    losses: list[float] = []
    bar = tqdm(range(args.steps), desc=name, unit="step", disable=None if shown else True)
    start = time.perf_counter()
    for step in bar:
        loss = model(**inputs(text.batch(step, packed=args.op == "varlen"), args.op))
        optimizer.zero_grad()
        loss.backward()
        sync()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        losses.append(loss.item())
        if shown and (step % 10 == 0 or step == args.steps - 1):
            bar.write(f"{name}  step {step:3d}  loss {losses[-1]:.4f}")
    seconds = time.perf_counter() - start
    if shown:
        print(f"{name}: {args.steps * args.seq_len / seconds:,.0f} tokens/s")
    return losses


def main(args: argparse.Namespace) -> int:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    torch.set_num_threads(max(1, cores // world))
    text = PackedText(load_documents(), args.seq_len, seed=0)
    torch.manual_seed(0)
    model = Llama(LlamaConfig(op=args.op))
    dummy = inputs(text.batch(0, packed=args.op == "varlen"), args.op)

    parallel = parallelize(model, dummy, "cp", ComputeConfig(world, world))
    if rank == 0:
        print(parallel.plan)
    losses = train(f"{world} ranks", parallel, parallel.sync_grad, text, args)

    difference = 0.0
    if rank == 0 and not args.no_compare:
        torch.set_num_threads(cores)
        alone = train("one rank", model, lambda: None, text, args)
        # numpy's max, unlike Python's, is NaN where any loss is.
        difference = float(np.abs(np.subtract(losses, alone)).max())
        print(
            f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; largest difference from one rank over "
            f"{args.steps} steps: {difference:.1e} (allowed {TOLERANCE:.0e})"
        )
    dist.barrier()
    dist.destroy_process_group()
    return int(not difference < TOLERANCE)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nproc", type=int, default=2, help="processes to cut the sequence over")
    parser.add_argument("--op", choices=("ring", "zigzag", "varlen"), default="ring")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens (bytes of text) a step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--no-compare", action="store_true", help="skip the run on one rank")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    # torchrun takes --nproc for an option of its own.
    given = {name: value for name, value in vars(arguments).items() if name != "nproc"}
    flags = [f"--{n.replace('_', '-')}={v}" for n, v in given.items() if not isinstance(v, bool)]
    flags += [f"--{n.replace('_', '-')}" for n, v in given.items() if v is True]
    start_ranks(arguments.nproc, flags)
    sys.exit(main(arguments))
