"""torchtitan's two hooks of context parallelism, over this package's attention.

Import ``apply_cp_to_forward`` and ``prepare_context_parallel_input`` from here in place of
``torchtitan.distributed.context_parallel``: names and arguments are those of torchtitan 0.3.0.
Set ``parallelism.spmd_backend="partial_dtensor"``: under its default, "spmd_types", torchtitan
refuses these attentions over ranks and never calls ``apply_cp_to_forward``. torchtitan is not
needed to import this.

    inner attention                 attended over the ranks
    ScaledDotProductAttention       causal, or all tokens with is_causal=False
    VarlenAttention                 documents, and its window; refused by torchtitan's own hook
    FlexAttention                   refused; take the attention backend "varlen"

Refused by name: the load balancer "ptrr", which distributes blocks of a BlockMask, and an
``out_transform``, which needs the lse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...core.comm import Comm
from ...core.comm.comm_groups import GroupLike, group_comm
from ...core.layout import Layout
from ...op.arguments import ArgumentError
from ...ring_attn import wrap_ring_attn_func
from ...ring_attn_varlen import wrap_ring_attn_varlen_func
from ..peer_calls import group_of
from ..transformers.batch_mask import repeated

LAYOUTS: dict[str | None, Callable[[int, int], Layout]] = {
    "headtail": Layout.zigzag,
    None: Layout.contiguous,
}
# The load balancer that cuts a group's batches: only one, since checkpoints rerun attention later.
_prepared: WeakKeyDictionary[Comm, str | None] = WeakKeyDictionary()


def apply_cp_to_forward(
    attention_modules: Sequence[nn.Module], cp_mesh: DeviceMesh | GroupLike
) -> None:
    """Make inner attentions attend to the whole sequence, of which each rank passes its tokens.

    Shards are those of the group's :func:`prepare_context_parallel_input`. Until that is called,
    the attentions raise ValueError.

    Args:
        attention_modules: ``ScaledDotProductAttention`` or ``VarlenAttention`` of torchtitan,
            recognized by the names of their classes or base classes. q, k and v are [b, l, h, d],
            and l is the same on every rank.
        cp_mesh: a mesh of one dim, whose ranks share the sequence; a group works as well.
    Raises:
        NotImplementedError: another attention.
    """
    comm = group_comm(group_of("apply_cp_to_forward", cp_mesh))
    made = [_attention_of(module) for module in attention_modules]
    for module, attend in zip(attention_modules, made, strict=True):
        module.forward = partial(attend, module, comm)


def _layout_of(comm: Comm, length: int) -> Layout:
    """The layout of the whole sequence, of which each rank holds ``length`` tokens."""
    if comm not in _prepared:
        raise ArgumentError(
            "apply_cp_to_forward: no batch was cut over its group; give the same mesh to "
            "prepare_context_parallel_input, and call that first"
        )
    return LAYOUTS[_prepared[comm]](length * comm.size, comm.size)


def _attention_of(module: nn.Module) -> Callable[..., Any]:
    for each in type(module).__mro__:
        if each.__name__ in ATTENTIONS:
            return ATTENTIONS[each.__name__]
    raise NotImplementedError(
        f"apply_cp_to_forward: {type(module).__name__} is none of {', '.join(ATTENTIONS)}; choose "
        "the model's attention backend 'varlen', or 'sdpa', which torchtitan no longer gives "
        "language models"
    )


def _sdpa(
    module: nn.Module,
    comm: Comm,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attention_masks: None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    is_causal: bool = True,
    **others: Any,
) -> Tensor:
    """q [b, l, h, d], k and v [b, l, g, d] -> [b, l, h, d], with ``enable_gqa`` or without."""
    _refuse(module, others, attention_masks=attention_masks)
    where = _layout_of(comm, q.shape[1])
    out: Any = wrap_ring_attn_func(
        q, k, v, softmax_scale=scale, causal=is_causal, process_group=comm, layout=where
    )
    return out


def _varlen(
    module: nn.Module,
    comm: Comm,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attention_masks: Any,
    scale: float | None = None,
    enable_gqa: bool = False,
    out_transform: None = None,
    **others: Any,
) -> Tensor:
    """The same shapes; ``attention_masks`` has cu_seq_q and cu_seq_k over all rows' tokens."""
    _refuse(module, others, out_transform=out_transform)
    (rows, length), window = q.shape[:2], module.window_size
    left, right = int(window[0]), int(window[1])  # type: ignore[index, arg-type]
    out: Any = wrap_ring_attn_varlen_func(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        attention_masks.cu_seq_q,
        attention_masks.cu_seq_k,
        softmax_scale=scale,
        causal=right == 0,
        window_size=(left, right),
        process_group=comm,
        layout=repeated(_layout_of(comm, length), rows),
    )
    return out.unflatten(0, (rows, length))


ATTENTIONS: dict[str, Callable[..., Any]] = {
    "ScaledDotProductAttention": _sdpa,
    "VarlenAttention": _varlen,
}


def _refuse(module: nn.Module, others: dict[str, Any], **named: Any) -> None:
    for name, value in {**others, **named}.items():
        if value is not None:
            raise NotImplementedError(
                f"{type(module).__name__} over ranks: {name} of type {type(value).__name__} is not "
                "supported; leave it out"
            )


def prepare_context_parallel_input(
    inputs: Tensor,
    labels: Tensor,
    extra_kwargs: dict[str, Any],
    cp_mesh: DeviceMesh | GroupLike,
    device: torch.device,
    load_balancer_type: str | None = "headtail",
    ptrr_mask_key: str | None = None,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """This rank's part of inputs, labels and positions, which are [b, l] of the whole sequence.

    Args:
        extra_kwargs: positions [b, l] or [1, l] are cut. attention_masks, of the whole sequence,
            and anything else stay unchanged.
        device: torchtitan's argument; tensors stay where they are.
        load_balancer_type: "headtail" for zigzag shards, or None for contiguous ones.
        ptrr_mask_key: None.
    Raises:
        ValueError: another load balancer, or a different one than for earlier batches of the group;
            or l is not divisible by the ranks (times 2).
    """
    title = "prepare_context_parallel_input"
    if load_balancer_type not in LAYOUTS:
        raise ArgumentError(
            f"{title}: load_balancer_type={load_balancer_type!r}: there are 'headtail' and None; "
            "set parallelism.context_parallel_load_balancer to one of them"
        )
    if ptrr_mask_key is not None:
        raise ArgumentError(f"{title}: ptrr_mask_key={ptrr_mask_key!r} goes with 'ptrr'; give None")
    comm, length = group_comm(group_of(title, cp_mesh)), inputs.shape[1]
    ranks = comm.size
    parts = ranks if load_balancer_type is None else 2 * ranks
    if length % parts:
        raise ArgumentError(
            f"{title}: inputs have {length} tokens a row; give a multiple of {parts} for "
            f"{ranks} ranks with load_balancer_type={load_balancer_type!r}"
        )
    if (before := _prepared.setdefault(comm, load_balancer_type)) != load_balancer_type:
        raise ArgumentError(
            f"{title}: load_balancer_type={load_balancer_type!r}, but batches of the group were "
            f"cut with {before!r} before; make another group for it"
        )
    where = LAYOUTS[load_balancer_type](length, ranks)
    own = [
        where.shard(t, comm.rank).contiguous() for t in (inputs, labels, extra_kwargs["positions"])
    ]
    return own[0], own[1], {**extra_kwargs, "positions": own[2]}
