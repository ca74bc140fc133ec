"""Attention over ranks for a video model that generates its frames in chunks.

As in MAGI-1 (Sand AI, arXiv:2505.13211, 2025), tokens lie frame by frame, a chunk of frames attends
to itself and to a number of chunks before it, and videos of different lengths are packed in one
sequence. Shows that the result over ranks is that of dense attention, and that a balanced layout
evens out the work that contiguous shards leave uneven.

    python examples/video_block_mask.py                     2 processes
    python examples/video_block_mask.py --ranks 4 --reach 2
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from shared.launch import count, on_ranks, verdict
from torch import Tensor

from customized_ops.ring_attention import AttnMask, Layout, make_plan, wrap_masked_attn_func

EVEN = 1.05  # allowed ratio of a rank's pairs to the mean, in the balanced layout


def video_mask(chunks: Sequence[int], chunk_tokens: int, reach: int) -> AttnMask:
    """Packed videos with these numbers of chunks; a chunk also attends to ``reach`` chunks before.

    chunks 3 and 2, of one token, reach 1:     x . . . .
                                               x x . . .
                                               . x x . .
                                               . . . x .
                                               . . . x x
    """
    rows, keys, first = [], [], 0
    for length in chunks:
        for chunk in range(first, first + length):
            rows.append((chunk * chunk_tokens, (chunk + 1) * chunk_tokens))
            keys.append((max(first, chunk - reach) * chunk_tokens, (chunk + 1) * chunk_tokens))
        first += length
    total = first * chunk_tokens
    return AttnMask.from_ranges(rows, keys, ["full"] * len(rows), total, total)


def attend(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: AttnMask, layout: Layout
) -> list[Tensor]:
    """This rank's rows of out, dq, dk and dv."""
    q, k, v, dout = (layout.shard(t, dist.get_rank()) for t in (q, k, v, dout))
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    group = dist.group.WORLD
    out = wrap_masked_attn_func(*leaves, mask, process_group=group, layout=layout)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def dense(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: AttnMask) -> list[Tensor]:
    """The same for all rows on one device, by torch's own attention with a dense mask."""
    allowed = torch.from_numpy(mask.to_dense()).to(q.device)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    heads_first = (t.transpose(1, 2) for t in leaves)
    scaled_dot_product = torch.nn.functional.scaled_dot_product_attention
    out = scaled_dot_product(*heads_first, attn_mask=allowed).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def main(given: argparse.Namespace, device: torch.device) -> int:
    """Run on every rank; returns 0 if the result is the dense one, and the layout is balanced."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunk_tokens = given.frames * given.height * given.width
    mask = video_mask(given.chunks, chunk_tokens, given.reach)
    tokens = torch.Generator().manual_seed(0)
    shape = (4, 1, mask.q_len, 2, 16)
    q, k, v, dout = torch.randn(shape, generator=tokens, dtype=torch.float64).to(device)
    whole = dense(q, k, v, dout, mask)

    layouts = {"contiguous": Layout.contiguous(mask.q_len, ranks)}
    layouts["balanced"] = Layout.balanced(mask, ranks)
    apart, imbalance = [q.new_zeros(1)], {}  # a rank may hold no token
    for name, layout in layouts.items():
        # Who holds a row computes it; without a layout the planner may also move rows.
        area = make_plan(mask, layout, assignment="owner").area
        imbalance[name] = area.max() / area.mean()
        for cut, want in zip(attend(q, k, v, dout, mask, layout), whole, strict=True):
            apart.append((cut - layout.shard(want, rank)).abs().flatten())
    difference = torch.cat(apart).max().item()  # NaN if any is, unlike Python's max
    if rank == 0:
        shape = f"{given.frames} x {given.height} x {given.width} tokens"
        print(f"videos of {given.chunks} chunks of {shape}, on {ranks} ranks: {mask.area} pairs")
        for name, most in imbalance.items():
            print(f"  {name:10}  the busiest rank has {most:.3f} of the mean")
    failed = verdict("out and gradients over ranks as of dense attention", difference, 1e-10)
    least = ranks * mask.to_dense().sum(1).max() / mask.area  # some rank has the longest row
    gained = max(0.0, imbalance["balanced"] - max(least, min(EVEN, imbalance["contiguous"])))
    return failed | verdict("the balanced layout evens the work out", gained, 0.0)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--ranks", type=count, default=2)
    add("--chunks", type=count, nargs="+", default=[9, 3, 4], help="of each video")
    add("--reach", type=int, default=8, help="chunks before its own that a chunk attends to")
    add("--frames", type=count, default=3, help="of a chunk, in latents")
    add("--height", type=count, default=4, help="tokens of a frame")
    add("--width", type=count, default=5)
    given = parser.parse_args(arguments)
    if given.reach < 0:
        parser.error(f"argument --reach: {given.reach} is negative")
    return given


if __name__ == "__main__":
    options = parse()
    on_ranks(lambda device: main(options, device), options.ranks)
