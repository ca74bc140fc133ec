"""PyTorch's context parallelism (``torch.distributed.tensor.experimental``), by its names.

| theirs | here |
|---|---|
| `context_parallel(mesh, buffers=, buffer_seq_dims=, no_restore_buffers=)` | the same; `layout=` |
| `F.scaled_dot_product_attention` in it | `wrap_ring_attn_func`, `wrap_masked_attn_func` |
| `flex_attention` in it | :func:`flex_attention` of this module; torch's own is refused |
| `context_parallel_unshard(mesh, buffers, seq_dims)` | the same; `layout=` |
| `_context_parallel_shard(mesh, buffers, seq_dims)` | `context_parallel_shard`; `layout=` |
| `_ContextParallel(seq_dim, attention_type)` | `ContextParallel`, for `parallelize_module` |
| `_create_cp_block_mask` | a BlockMask of the whole sequence is passed as it is |
| the head-tail load balancer | `layout="zigzag"`, if not said; without it `"contiguous"` |
| another load balancer | any `Layout` |

What differs: lengths need not divide. Attention need not be causal for `layout="zigzag"`.
`attn_mask` and `dropout_p` are accepted (see :func:`.sdpa.sdpa`). Buffers are swapped for their
shards and back, so tensors that share their memory keep the whole. `kernel=` chooses the kernel;
`torch.nn.attention.sdpa_kernel` chooses among kernels that are not used here.

Refused, each with its reason: masks that add to scores, `score_mod`, `kernel_options`,
`max_scores`, BlockMasks that differ by batch entry or head, `seq_dim` other than 2, buffers that
require gradients, `nn.MultiheadAttention` that returns weights. `set_rotate_method` is not here: a
plan chooses how keys move.

Run the backward in the block, too, for two reasons. Buffers that it reads (token ids of an
embedding, a table of cosines) are whole again outside, which autograd notices and refuses. And what
checkpoints recompute is attention of the whole sequence only inside the block, if it is called as
`F.scaled_dot_product_attention`. (A name that was bound to the function earlier is intercepted only
in the forward.) A checkpoint inside a module of style `ContextParallel` cannot be intercepted;
checkpoint the module.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask

from ...core.comm.comm_groups import GroupLike, group_comm
from ...core.layout import Layout
from ...layout_ops import wrap_unshard_func
from ...op.arguments import ArgumentError, checked
from ..peer_calls import group_of, without_first
from .block_mask import mask_of_block_mask
from .interception import attention_over, current, running
from .parallel_style import AttentionType, ContextParallel
from .sdpa import SequenceSharding, flex

__all__ = [
    "AttentionType",
    "ContextParallel",
    "context_parallel",
    "context_parallel_shard",
    "context_parallel_unshard",
    "flex_attention",
    "mask_of_block_mask",
]

Mesh = DeviceMesh | GroupLike
KINDS = ("zigzag", "contiguous")


@contextmanager
def context_parallel(
    mesh: Mesh,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Collection[Tensor] | None = None,
    layout: Layout | str = "zigzag",
    kernel: str = "auto",
) -> Iterator[None]:
    """A block in which buffers are this rank's shards and attention is that of the whole sequence.

    Args:
        mesh: of one axis; or a ProcessGroup, or global ranks.
        buffers: tensors that every rank holds whole and that need no gradient; all equally long
            along ``buffer_seq_dims``. In the block each holds this rank's tokens; afterwards it is
            whole again.
        no_restore_buffers: the buffers that stay cut.
        layout: ``"zigzag"``, which evens out the work under a causal mask, ``"contiguous"``, or a
            Layout. Without buffers it must be a Layout.
        kernel: as in ``wrap_masked_attn_func``.
    Raises:
        ArgumentError: an argument does not fit; raised on every rank.
    """
    title = "context_parallel"
    group = group_of(title, mesh)
    tensors, kept = list(buffers or ()), list(no_restore_buffers or ())
    dims = list(buffer_seq_dims or ())

    def check() -> Layout:
        _check_buffers(title, tensors, dims)
        for tensor in kept:
            if not any(tensor is each for each in tensors):
                raise ArgumentError(f"{title}: no_restore_buffers must be among buffers")
        lengths = [tensor.shape[dim] for tensor, dim in zip(tensors, dims, strict=True)]
        if len(set(lengths)) > 1:
            raise ArgumentError(f"{title}: buffers are of different lengths, {lengths}")
        return _layout(title, layout, lengths[0] if lengths else None, group)

    how = checked(title, group, check, lambda chosen: {"layout": str(chosen)})
    sharding = SequenceSharding(group, how, kernel)
    wholes = [tensor.data for tensor in tensors]
    try:
        for tensor, whole, dim in zip(tensors, wholes, dims, strict=True):
            tensor.data = how.shard(whole, sharding.comm.rank, dim).clone()
        with attention_over(sharding):
            yield
    finally:
        for tensor, whole in zip(tensors, wholes, strict=True):
            if not any(tensor is each for each in kept):
                tensor.data = whole
                # Autograd may have saved the shard, and the tensor is whole now: it must raise.
                torch.autograd.graph.increment_version(tensor)


def context_parallel_shard(
    mesh: Mesh,
    buffers: Any,
    seq_dims: Sequence[int] | Mapping[str, int],
    *,
    layout: Layout | str = "zigzag",
) -> Any:
    """This rank's tokens of tensors that every rank holds whole.

    Args:
        buffers: a sequence, or a mapping with ``seq_dims`` by the same names. BlockMasks are
            returned as they are: :func:`flex_attention` takes those of the whole sequence.
    Returns:
        a list, or a dict. The gradient of a whole tensor is that of this rank's tokens.
    """
    title = "context_parallel_shard"
    group = group_of(title, mesh)
    names = list(buffers) if isinstance(buffers, Mapping) else range(len(buffers))

    def check() -> dict[Any, Any]:
        given = seq_dims if isinstance(seq_dims, Mapping) else range(len(seq_dims))
        if set(given) != set(names):
            raise ArgumentError(
                f"{title}: seq_dims are of {list(given)}, but buffers of {list(names)}"
            )
        rank = group_comm(group).rank
        shards = {}
        for name in names:
            x, dim = buffers[name], seq_dims[name]  # type: ignore[index]
            if not isinstance(x, BlockMask):
                _check_buffers(title, [x], [dim], gradients=True)
                x = _layout(title, layout, x.shape[dim], group).shard(x, rank, dim)
            shards[name] = x
        return shards

    shards = checked(title, group, check)
    return shards if isinstance(buffers, Mapping) else list(shards.values())


@torch.no_grad()
def context_parallel_unshard(
    mesh: Mesh,
    buffers: Sequence[Tensor],
    seq_dims: Sequence[int],
    load_balancer: None = None,
    *,
    layout: Layout | str = "zigzag",
) -> list[Tensor]:
    """The whole tensors, in order, on every rank, from its shards; no gradient flows.

    Args:
        load_balancer: only None; use ``layout`` instead.
        layout: the one that the shards were made with.
    """
    title = "context_parallel_unshard"
    group = group_of(title, mesh)

    def check() -> Any:
        if load_balancer is not None:
            raise NotImplementedError(f"{title}: load_balancer is not taken; say layout=")
        return _check_buffers(title, buffers, seq_dims, gradients=True)

    dims = checked(title, group, check)
    comm = group_comm(group)
    held = comm.all_gather_object([x.shape[dim] for x, dim in zip(buffers, dims, strict=True)])
    wholes = []
    for x, dim, sizes in zip(buffers, dims, zip(*held, strict=True), strict=True):  # type: ignore[arg-type]
        how = _layout(title, layout, sum(sizes), group)
        if how.sizes != sizes:
            raise ArgumentError(
                f"{title}: ranks hold {list(sizes)} tokens, but layout {how} gives them "
                f"{list(how.sizes)}"
            )
        wholes.append(wrap_unshard_func(x, how, group, dim))
    return wholes


def flex_attention(*args: Any, **kwargs: Any) -> Any:
    """``b (g n) l hd^, b g l hd^, b g l vd^ -> b (g n) l vd^``: torch's function of this name; in a
    block that of the whole sequence, of which this rank gives its tokens. See :func:`.sdpa.flex`.
    """
    with running():
        return flex(current() or SequenceSharding(), *args, **kwargs)


flex_attention.__signature__ = without_first(flex)  # type: ignore[attr-defined]


def _layout(title: str, layout: Layout | str, total: int | None, group: GroupLike) -> Layout:
    ranks = group_comm(group).size
    if isinstance(layout, str) and layout in KINDS:
        if total is None:
            raise ArgumentError(
                f"{title}: layout={layout!r} without buffers: how long the sequence is must be "
                "said, by buffers or a Layout"
            )
        return getattr(Layout, layout)(total, ranks)
    if not isinstance(layout, Layout):
        raise ArgumentError(f"{title}: layout must be {KINDS} or a Layout, got {layout!r}")
    if layout.group_size != ranks or total not in (None, layout.total):
        raise ArgumentError(
            f"{title}: layout {layout} is for {layout.total} tokens over {layout.group_size} "
            f"ranks, but there are {total} over {ranks}"
        )
    return layout


def _check_buffers(
    title: str, buffers: Sequence[Any], dims: Sequence[int], *, gradients: bool = False
) -> list[int]:
    """The dims of tokens as nonnegative numbers."""
    if len(buffers) != len(dims):
        raise ArgumentError(f"{title}: {len(buffers)} buffers, but {len(dims)} dims of tokens")
    for n, (x, dim) in enumerate(zip(buffers, dims, strict=True)):
        if not isinstance(x, Tensor) or isinstance(x, DTensor):
            raise ArgumentError(f"{title}: buffers[{n}] must be a tensor, got {type(x).__name__}")
        if not -x.ndim <= dim < x.ndim:
            raise ArgumentError(f"{title}: dim {dim} of buffers[{n}], which has {x.ndim}")
        if x.requires_grad and not gradients:
            raise ArgumentError(
                f"{title}: buffers[{n}] requires a gradient, which a tensor that is cut in place "
                "does not get; use context_parallel_shard, or wrap_shard_func"
            )
        if any(x is other for other in buffers[:n]):
            raise ArgumentError(f"{title}: buffers[{n}] is among those before it")
    return [dim % x.ndim for x, dim in zip(buffers, dims, strict=True)]
