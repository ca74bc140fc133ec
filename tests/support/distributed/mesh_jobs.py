"""Data parallel x context parallel by hand, as a job for ranks, and the same on one device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from dtensor_jobs import mesh_of
from rank_groups import device, in_their_own_time
from torch import Tensor, nn

from customized_ops.ring_attention import Layout, wrap_ring_attn_func, wrap_zigzag_attn_func

TOKENS, WIDTH, HEADS, STEPS, LATE_SECONDS = 26, 6, 2, 3, 0.3


class Attention(nn.Module):
    """Projections around attention, which ``attend`` computes of q, k and v."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = nn.Linear(WIDTH, 3 * HEADS * 4), nn.Linear(HEADS * 4, WIDTH)
        self.double()

    def forward(self, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        q, k, v = self.into(x).unflatten(-1, (3 * HEADS, 4)).chunk(3, -2)
        return self.out(attend(q, k, v).flatten(-2))


def batch(row: int, step: int) -> Tensor:
    """A row's own: as many sequences as its number, and one."""
    generator = torch.Generator().manual_seed(10 * row + step)
    return torch.randn(1 + row, TOKENS, WIDTH, generator=generator, dtype=torch.float64)


def layout_of(row: int, ranks: int) -> Layout:
    """A row's own, too."""
    return Layout.zigzag(TOKENS, ranks) if row % 2 else Layout.contiguous(TOKENS, ranks)


def attention_of(row: int, **where: Any) -> Callable[..., Tensor]:
    """And so is what it computes."""
    if row % 2:
        return lambda q, k, v: wrap_zigzag_attn_func(q, k, v, window_size=(7, 0), **where)
    return lambda q, k, v: wrap_ring_attn_func(q, k, v, causal=row > 1, **where)


@in_their_own_time
def on_a_mesh(shape: tuple[int, int], late: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """This rank's results of some steps, and gradients added up over tokens, batches and steps."""
    mesh = mesh_of(shape)
    row, (copies, sequence) = mesh.get_local_rank("outer"), mesh.get_all_groups()
    layout = layout_of(row, sequence.size())
    model = Attention().to(device())
    attend = attention_of(row, process_group=sequence, layout=layout)
    outs = []
    for step in range(STEPS):
        if dist.get_rank() == late:
            time.sleep(LATE_SECONDS)
        out = model(layout.shard(batch(row, step), sequence.rank()).to(device()), attend)
        out.square().sum().backward()
        outs.append(out.detach().cpu())
    for parameter in model.parameters():
        for group in (sequence, copies):
            dist.all_reduce(parameter.grad, group=group)
    return outs, {name: p.grad.cpu() for name, p in model.named_parameters()}


def alone(copies: int) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """The whole results of each row's steps, and the gradients."""
    model = Attention()
    outs = []
    for row in range(copies):
        outs.append([model(batch(row, step), attention_of(row)) for step in range(STEPS)])
    sum(out.square().sum() for of_row in outs for out in of_row).backward()
    whole = [[out.detach() for out in of_row] for of_row in outs]
    return whole, {name: p.grad for name, p in model.named_parameters()}
