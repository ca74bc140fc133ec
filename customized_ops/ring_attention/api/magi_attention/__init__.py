"""MagiAttention's functions, by its names (https://github.com/SandAI-org/MagiAttention, 2025).

| theirs | here |
|---|---|
| `magi_attn_flex_key`, `magi_attn_varlen_key` | a key: an AttnMask, a layout, a group, as a value |
| `make_*_key_for_new_mask_after_dispatch` | the same layout, another mask |
| `dispatch`, `undispatch` | `wrap_shard_func`, `wrap_unshard_func` along dim 0 |
| `calc_attn` | `wrap_masked_attn_func` |
| `roll`, `roll_simple` | `wrap_roll_func`; over padding too, as theirs |
| `get_position_ids` | `Layout.positions` |
| `flex_flash_attn_func` | `wrap_masked_attn_func` with no group |
| `DispatchConfig(chunk_size, alg)` | `Layout.balanced`; contiguous by `SequentialDispatchAlg` |
| `AttnRanges`, `AttnMaskType`, `infer_*`, `compute_pad_size`, `squash_batch_dim` | as theirs |
| `OverlapConfig` with `AttnOverlapMode`, `*OverlapAlg` | their defaults alone: plans choose |
| `GrpCollConfig` | not here: it tunes the messages of their kernels |
| `LB`-, `DP`-, `BS`-, `ToppHeapDispatchAlg`, `SortedSequentialSelectAlg` | not here |
| `DistAttnRuntimeDictManager`, `dist_attn_runtime_dict_mgr` | not here: keys do not expire |

What differs:

- Lengths need not divide, so nothing is padded unless `pad_size` says so (theirs pads by itself);
  ranks may then hold different numbers of tokens. Padding attends to nothing: out is 0, lse -inf.
- A key does not expire: it is a value.
- Windows over documents whose keys are fewer than their queries are flash-attn's.
- `sink`: as in theirs, a rank's gradient is that of its own rows; add up over the group. lse
  includes the sink.

Refused, each with its reason: `is_same_source`, `is_q_permutable` or `is_k_permutable` False (cross
attention), an `OverlapConfig` with other values, a `grpcoll_config`, other dispatch algorithms,
`return_max_logits` (no kernel returns them), and in `flex_flash_attn_func` also
`index_attn_indices`, `sink_layout="ssh"` and whatever tunes their kernel. The environment variables
`MAGI_ATTENTION_*` tune their messages, and are not used here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.comm.comm_groups import comm_by_name
from ...core.layout import Layout
from ...layout_ops import wrap_roll_func, wrap_shard_func, wrap_unshard_func
from ...op.arguments import checked, require
from ..peer_calls import refuse
from .config import (
    AttnOverlapMode,
    DispatchAlg,
    DispatchConfig,
    DistAttnConfig,
    GreedyOverlapAlg,
    MinHeapDispatchAlg,
    OverlapAlg,
    OverlapConfig,
    SequentialDispatchAlg,
    UniformOverlapAlg,
)
from .flex import REFUSED, AttnForwardMeta, attention, flex_flash_attn_func
from .key import (
    DistAttnRuntimeKey,
    clear_cache,
    get_most_recent_key,
    magi_attn_flex_key,
    magi_attn_varlen_key,
    make_flex_key_for_new_mask_after_dispatch,
    make_varlen_key_for_new_mask_after_dispatch,
)
from .ranges import (
    AttnMaskType,
    AttnRange,
    AttnRanges,
    GeneralAttnMaskType,
    compute_pad_size,
    infer_attn_mask_from_cu_seqlens,
    infer_attn_mask_from_sliding_window,
    infer_varlen_mask_from_batch,
    squash_batch_dim,
)

__all__ = [
    "AttnForwardMeta",
    "AttnMaskType",
    "AttnOverlapMode",
    "AttnRange",
    "AttnRanges",
    "DispatchAlg",
    "DispatchConfig",
    "DistAttnConfig",
    "DistAttnRuntimeKey",
    "GeneralAttnMaskType",
    "GreedyOverlapAlg",
    "MinHeapDispatchAlg",
    "OverlapAlg",
    "OverlapConfig",
    "SequentialDispatchAlg",
    "UniformOverlapAlg",
    "calc_attn",
    "clear_cache",
    "compute_pad_size",
    "dispatch",
    "flex_flash_attn_func",
    "get_most_recent_key",
    "get_position_ids",
    "infer_attn_mask_from_cu_seqlens",
    "infer_attn_mask_from_sliding_window",
    "infer_varlen_mask_from_batch",
    "magi_attn_flex_dispatch",
    "magi_attn_flex_key",
    "magi_attn_varlen_dispatch",
    "magi_attn_varlen_key",
    "make_flex_key_for_new_mask_after_dispatch",
    "make_varlen_key_for_new_mask_after_dispatch",
    "roll",
    "roll_simple",
    "squash_batch_dim",
    "undispatch",
]


def dispatch(x: Tensor, key: DistAttnRuntimeKey, pad_value: float = 0.0) -> Tensor:
    """``l * -> l *``: this rank's tokens of ``x``, which every rank holds whole, without padding.

    The gradient of x covers all ranks' tokens, and is the same on every rank.

    Raises:
        ArgumentError: x is not as long as the key says.
    """
    tokens = key.total_seqlen_q - key.pad_size

    def check() -> None:
        shape = tuple(getattr(x, "shape", ()))
        fits = isinstance(x, Tensor) and shape[:1] == (tokens,)
        require(fits, "dispatch", "x", f"{tokens} tokens along dim 0", shape)

    checked("dispatch", key.comm, check)
    if key.pad_size:
        x = torch.cat([x, x.new_full((key.pad_size, *x.shape[1:]), pad_value)])
    return wrap_shard_func(x, key.layout, key.comm, 0)


class _Gather(torch.autograd.Function):
    """The whole tensor. Its gradient is the same on every rank, so the backward sends nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, group: str) -> Tensor:
        """``l * -> l *``"""
        ctx.layout, ctx.rank = layout, comm_by_name(group).rank
        return wrap_unshard_func(x.detach(), layout, comm_by_name(group), 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """This rank's tokens."""
        return ctx.layout.shard(grads[0], ctx.rank, 0), None, None


def undispatch(x: Tensor, key: DistAttnRuntimeKey, is_partial_grad: bool = False) -> Tensor:
    """``l * -> l *``: the whole tensor, in order and without padding, on every rank.

    Args:
        is_partial_grad: whether gradients of the whole differ by rank, and are added up. With
            False, as in MagiAttention, they must be the same on every rank: each rank takes its
            tokens from its own copy.
    """
    if is_partial_grad:
        whole = wrap_unshard_func(x, key.layout, key.comm, 0)
    else:
        whole = _Gather.apply(x, key.layout, key.group)
    return whole.narrow(0, 0, key.total_seqlen_q - key.pad_size)


def roll(x: Tensor, shift: int, dim: int, key: DistAttnRuntimeKey) -> Tensor:
    """``torch.roll`` of the whole sequence along ``dim``, of which this rank holds its tokens;
    padding takes part. Only tokens whose new place is on another rank move."""
    return wrap_roll_func(x, shift, key.layout, key.comm, dim)


roll_simple = roll  # differs in how messages go


def calc_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key: DistAttnRuntimeKey,
    sink: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    return_max_logits: bool = False,
) -> tuple[Tensor, AttnForwardMeta]:
    """``l (g n) hd^, l g hd^, l g vd^ -> l (g n) vd^``: attention of this rank's tokens under the
    key's mask, and its lse.

    Args:
        sink: [s, h] logits with no value, that join the softmax of every row; learnable.
        softmax_scale: None for 1 / sqrt(hd).
        return_max_logits: only False.
    Raises:
        ArgumentError: heads, widths or lengths of the tensors differ from those of the key.
        NotImplementedError: return_max_logits.
    """

    def check() -> None:
        refuse("calc_attn", REFUSED, return_max_logits=bool(return_max_logits))
        _check_shapes(q, k, v, key)

    checked("calc_attn", key.comm, check)
    return attention(
        q,
        k,
        v,
        key.mask,
        sink,
        softmax_scale=softmax_scale,
        softcap=softcap,
        process_group=key.comm,
        layout=key.layout,
    )


def get_position_ids(key: DistAttnRuntimeKey, device: torch.device | str | None = None) -> Tensor:
    """int64[l]: positions of this rank's tokens in the whole sequence. Padding has the position of
    the last token before it.

    Args:
        device: None for the current CUDA device, or the CPU where there is none.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    last = key.total_seqlen_q - key.pad_size - 1
    positions = np.minimum(key.layout.positions(key.comm.rank), last)
    return torch.from_numpy(positions).to(device)


def magi_attn_flex_dispatch(
    x: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, DistAttnRuntimeKey]:
    """:func:`magi_attn_flex_key` from the other arguments, and x dispatched by it."""
    key = magi_attn_flex_key(*args, **kwargs)
    return dispatch(x, key), key


def magi_attn_varlen_dispatch(
    x: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, DistAttnRuntimeKey]:
    """:func:`magi_attn_varlen_key` from the other arguments, and x dispatched by it."""
    key = magi_attn_varlen_key(*args, **kwargs)
    return dispatch(x, key), key


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, key: DistAttnRuntimeKey) -> None:
    for name, t, heads in (
        ("q", q, key.num_heads_q),
        ("k", k, key.num_heads_kv),
        ("v", v, key.num_heads_kv),
    ):
        width = t.shape[-1] if name == "v" else key.head_dim
        fits = t.ndim == 3 and t.shape[1:] == (heads, width)
        what = f"[tokens, {heads}, {width}], as the key says"
        require(fits, "calc_attn", name, what, tuple(t.shape))
