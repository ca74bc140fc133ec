"""MagiAttention's functions over ranks, as a job, and dense attention beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from dense import dense_attention
from dtensor_jobs import mesh_of
from rank_groups import device
from torch import Tensor

from customized_ops.ring_attention import AttnMask
from customized_ops.ring_attention.api import magi_attention as magi
from customized_ops.ring_attention.api.magi_attention import DistAttnConfig, DistAttnRuntimeKey

Ranges = tuple[tuple[int, int], ...]
BALANCED = magi.MinHeapDispatchAlg()


@dataclass(frozen=True)
class Magi:
    """A mask of typed ranges, and how its tokens are dealt."""

    total: int
    q_ranges: Ranges
    k_ranges: Ranges
    types: str | tuple[str, ...] = "full"
    heads: tuple[int, int] = (4, 2)
    chunk: int | None = None
    pad: int = 0
    sinks: int = 0
    softcap: float = 0.0
    alg: magi.DispatchAlg = BALANCED
    dtype: torch.dtype = torch.float64
    width: int = 8

    def tensors(self) -> list[Tensor]:
        """q, k, v, dout, dlse, and the sinks where there are any."""
        generator = torch.Generator().manual_seed(0)
        q, g = self.heads
        shapes = [(self.total, n, self.width) for n in (q, g, g, q)] + [(self.total, q)]
        shapes += [(self.sinks, q)] if self.sinks else []
        made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
        return [t.to(self.dtype).to(torch.float64) for t in made]  # of which bf16 loses nothing

    def key(self, group: Any) -> DistAttnRuntimeKey:
        """The key of a group."""
        dispatch = magi.DispatchConfig(chunk_size=self.chunk, alg=self.alg)
        return magi.magi_attn_flex_key(
            magi.AttnRanges.from_ranges(self.q_ranges),
            magi.AttnRanges.from_ranges(self.k_ranges),
            self.types if isinstance(self.types, str) else list(self.types),
            self.total,
            self.total,
            *self.heads,
            self.width,
            self.pad,
            group,
            dist_attn_config=DistAttnConfig(dispatch_config=dispatch),
        )

    @property
    def mask(self) -> AttnMask:
        """What the ranges say."""
        types = [self.types] * len(self.q_ranges) if isinstance(self.types, str) else self.types
        return AttnMask.from_ranges(self.q_ranges, self.k_ranges, types, self.total, self.total)


def cut(case: Magi, group: Any) -> list[Tensor]:
    """out, lse and gradients of the whole, from this rank's part of it."""
    key, comm = case.key(group), case.key(group).comm
    return _through(case, lambda q, k, v, sink: _cut(case, key, q, k, v, sink), comm, case.dtype)


def _cut(
    case: Magi, key: DistAttnRuntimeKey, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    own = [magi.dispatch(t, key) for t in (q, k, v)]
    out, meta = magi.calc_attn(*own, key, sink=sink, softcap=case.softcap)
    return magi.undispatch(out, key), magi.undispatch(meta.lse, key)


def one(case: Magi) -> list[Tensor]:
    """out, lse and gradients by flex_flash_attn_func."""

    def call(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        types = [case.types] * len(case.q_ranges) if isinstance(case.types, str) else case.types
        numbers = [magi.AttnMaskType(kind).to_int_type() for kind in types]
        ranges = [torch.tensor(r, dtype=torch.int32) for r in (case.q_ranges, case.k_ranges)]
        out, meta = magi.flex_flash_attn_func(
            q, k, v, *ranges, torch.tensor(numbers), sink=sink, softcap=case.softcap
        )
        return out, meta.lse

    return _through(case, call, None, case.dtype)


def dense(case: Magi) -> list[Tensor]:
    """out, lse and gradients by the specification, in fp64."""

    def call(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        one_sink = None if sink is None else sink.logsumexp(0)
        batched = [t.unsqueeze(0) for t in (q, k, v)]
        out, lse = dense_attention(
            *batched, case.mask, case.width**-0.5, softcap=case.softcap, sink=one_sink
        )
        return out[0], lse[0].T

    return _through(case, call, None, torch.float64, "cpu")


def _through(
    case: Magi,
    attend: Callable[..., tuple[Tensor, Tensor]],
    comm: Any,
    dtype: torch.dtype,
    where: str | None = None,
) -> list[Tensor]:
    where = where or device()
    q, k, v, dout, dlse, *sink = (t.to(where, dtype) for t in case.tensors())
    leaves = [t.requires_grad_() for t in (q, k, v, *sink)]
    out, lse = attend(q, k, v, sink[0] if sink else None)
    seen = lse.isfinite()
    loss = (out * dout).sum() + (lse.masked_fill(~seen, 0.0) * dlse).sum()
    grads = list(torch.autograd.grad(loss, leaves))
    if sink and comm is not None:  # a rank's gradient is that of its rows
        grads[3] = sum(comm.all_gather_object(grads[3].cpu()))
    return [t.detach().cpu() for t in (out, lse, *grads)]


def in_world(case: Magi) -> list[Tensor]:
    """Over all ranks."""
    return cut(case, dist.group.WORLD)


def on_a_mesh(case: Magi, shape: tuple[int, int]) -> list[Tensor]:
    """Over the second axis of a mesh, then over both."""
    mesh = mesh_of(shape)
    names = mesh.mesh_dim_names
    mine = cut(case, mesh[names[1]])
    return mine + cut(case, mesh)


def named(total: int = 40, **changes: Any) -> dict[str, Magi]:
    """Masks of every type, evenly dealt and not."""
    half, end = total // 2, total
    return {
        "causal": Magi(total, ((0, end),), ((0, end),), "causal", **changes),
        "full, chunks": Magi(total, ((0, end),), ((0, end),), chunk=3, **changes),
        "documents": Magi(
            total,
            ((0, 7), (7, half), (half, end)),
            ((0, 7), (7, half), (half, end)),
            "causal",
            **changes,
        ),
        "window": Magi(
            total,
            ((0, 9), (9, end)),
            ((0, 9), (0, end)),
            ("causal", "bi_causal"),
            chunk=4,
            sinks=2,
            **changes,
        ),
        "inverse, padded": Magi(
            total,
            ((0, half), (half, end - 5)),
            ((0, half + 4), (3, end)),
            ("inv_causal", "full"),
            chunk=8,
            pad=magi.compute_pad_size(total, 4, 8),
            softcap=3.0,
            **changes,
        ),
        "in order": Magi(
            total,
            ((0, end),),
            ((0, end),),
            "causal",
            chunk=7,
            alg=magi.SequentialDispatchAlg(),
            **changes,
        ),
    }
