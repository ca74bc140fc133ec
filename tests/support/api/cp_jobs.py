"""Attention in blocks of context_parallel, as jobs for ranks, and the same on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dtensor_jobs import mesh_of
from rank_groups import device
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

from customized_ops.ring_attention import Layout
from customized_ops.ring_attention.api import torch_context_parallel as cp
from customized_ops.ring_attention.api.torch_context_parallel import (
    context_parallel,
    context_parallel_unshard,
)

NAMES = ("out", "dq", "dk", "dv")
WIDTH = 12


@dataclass(frozen=True)
class Sdpa:
    """A call of SDPA or of flex_attention, and how its sequence is cut."""

    total: int = 29
    heads: tuple[int, int] = (2, 2)
    batch: int | None = 2
    layout: str = "zigzag"
    mask: str = ""  # "bool", "float", "documents": a BlockMask
    causal: bool = False
    scale: float | None = None
    dropout_p: float = 0.0
    dtype: torch.dtype = torch.float64
    width: int = 8

    def tensors(self) -> list[Tensor]:
        """q, k, v, dout: [b, h, l, d]."""
        generator = torch.Generator().manual_seed(0)
        lead = () if self.batch is None else (self.batch,)
        shapes = [(*lead, self.heads[n], self.total, self.width) for n in (0, 1, 1, 0)]
        made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
        return [t.to(self.dtype) for t in made]

    def allowed(self) -> Tensor:
        """bool[l, l]: documents, causal, and one pair more."""
        document = torch.arange(self.total) * 3 // self.total
        allowed = (document[:, None] == document).tril()
        allowed[3, self.total - 1] = True
        return allowed

    def call(self, where: Any) -> Callable[..., Tensor]:
        """The program's own call."""
        if self.mask == "documents":
            document = (torch.arange(self.total) * 3 // self.total).to(where)

            def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
                more = (i == 3) & (j == self.total - 1)
                return ((document[i] == document[j]) & (i >= j)) | more

            sizes = (None, None, self.total, self.total)
            block_mask = create_block_mask(mod, *sizes, device=str(where), BLOCK_SIZE=16)
            gqa = self.heads[0] != self.heads[1]
            given = {"block_mask": block_mask, "scale": self.scale, "enable_gqa": gqa}
            return lambda q, k, v: cp.flex_attention(q, k, v, **given)
        attn_mask = None
        if self.mask:
            attn_mask = self.allowed().to(where)
        if self.mask == "float":
            zeros = torch.zeros(1, 1, self.total, self.total, device=where)
            attn_mask = zeros.masked_fill(~attn_mask, -torch.inf)
        return lambda q, k, v: F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask,
            dropout_p=self.dropout_p,
            is_causal=self.causal,
            scale=self.scale,
            enable_gqa=self.heads[0] != self.heads[1],
        )


def in_block(case: Sdpa, mesh: Any) -> list[Tensor]:
    """NAMES of the whole, by ranks that each compute a part; and the buffers after."""
    buffers = [t.to(device()) for t in case.tensors()]
    dims = [-2] * 4
    call = case.call(device())
    with context_parallel(
        mesh,
        buffers=buffers,
        buffer_seq_dims=dims,
        layout=case.layout,
        no_restore_buffers={buffers[3]},
    ):
        leaves = [t.detach().clone().requires_grad_() for t in buffers[:3]]
        out = call(*leaves)
        grads = torch.autograd.grad(out, leaves, buffers[3])
    parts = [out.detach(), *grads]
    wholes = context_parallel_unshard(mesh, parts, dims, layout=case.layout)
    assert buffers[3].shape[-2] == out.shape[-2]
    assert all(torch.equal(a.cpu(), b) for a, b in zip(buffers[:3], case.tensors(), strict=False))
    return [t.cpu() for t in wholes]


def in_world(case: Sdpa) -> list[Tensor]:
    """Over all ranks, as an axis of a mesh; every rank's generator is another."""
    torch.manual_seed(7 + dist.get_rank())
    return in_block(case, mesh_of((dist.get_world_size(),)))


def alone(case: Sdpa) -> list[Tensor]:
    """By torch's own function, in fp64 from the case's numbers."""
    mask = "bool" if case.mask else ""
    return _one(replace(case, mask=mask), torch.float64, "cpu")


def on_one_device(case: Sdpa) -> list[Tensor]:
    """By the case's own call, in its dtype."""
    return _one(case, case.dtype, device())


def _one(case: Sdpa, dtype: torch.dtype, where: str) -> list[Tensor]:
    *leaves, dout = (t.to(where, dtype) for t in case.tensors())
    out = case.call(where)(*(t.requires_grad_() for t in leaves))
    return [t.detach().cpu() for t in (out, *torch.autograd.grad(out, leaves, dout))]


class Attention(nn.Module):
    """What a style is for: q, k, v in, attention of them out."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Block(nn.Module):
    """Projections around attention, [b, l, WIDTH] to the same; perhaps computed again."""

    def __init__(self, again: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = nn.Linear(WIDTH, 8 * 6), nn.Linear(4 * 6, WIDTH)
        self.attention, self.again = Attention(), again
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.again:
            return checkpoint(self.inner, x, use_reentrant=self.again == "reentrant")
        return self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        """The block."""
        q, k, v = self.into(x).unflatten(-1, (8, 6)).transpose(1, 2).split([4, 2, 2], 1)
        return x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(-2))


def batch(row: int, total: int = 26) -> Tensor:
    """A row's own."""
    generator = torch.Generator().manual_seed(row)
    return torch.randn(1 + row, total, WIDTH, generator=generator, dtype=torch.float64)


def step(model: Block, mesh: Any) -> tuple[Tensor, list[Tensor]]:
    """A loss and this rank's gradients, all in a block."""
    x = batch(0)
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        loss = model(x.requires_grad_()).square().sum()
        loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def styled(shape: tuple[int, int], again: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Data parallel x context parallel, by a plan; loss and gradients added up over all ranks."""
    mesh = mesh_of(shape)
    row, inner = mesh.get_local_rank("outer"), mesh["inner"]
    layout = Layout.zigzag(26, shape[1])
    model = Block().to(device())
    parallelize_module(model, inner, {"attention": cp.ContextParallel(layout=layout)})
    shards = cp.context_parallel_shard(inner, {"x": batch(row)}, {"x": 1}, layout=layout)
    x = shards["x"].to(device())
    total = (checkpoint(model, x, use_reentrant=False) if again else model(x)).square().sum()
    total.backward()
    loss = total.detach()
    for t in (loss, *(p.grad for p in model.parameters())):
        dist.all_reduce(t)
    return loss.cpu(), {name: p.grad.cpu() for name, p in model.named_parameters()}


def whole_mesh() -> str:
    """What is said of a mesh of two axes."""
    try:
        with context_parallel(mesh_of((2, 2)), layout=Layout.zigzag(8, 4)):
            return "nothing"
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
