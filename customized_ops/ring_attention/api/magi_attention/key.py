"""MagiAttention's keys: a mask, the layout of its tokens, and the group, as one value."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ...core.comm import Comm
from ...core.comm.comm_groups import GroupLike, comm_by_name, group_name
from ...core.layout import Layout
from ...core.mask import AttnMask
from ...op.arguments import ArgumentError, is_integer, require
from ...op.tokens.lengths import CuSeqlens
from ..peer_calls import group_of
from .config import DistAttnConfig, dispatch_layout
from .ranges import GeneralAttnMaskType, mask_of_documents, mask_of_ranges


@dataclass(frozen=True)
class DistAttnRuntimeKey:
    """The arguments of :func:`.calc_attn` and related functions that all ranks share, as a hashable
    value. Plans are cached by value elsewhere, so no key ever expires.

    Attributes:
        mask: of all tokens, padding included; rows and keys of padding attend to nothing.
        layout: which rank holds which tokens.
        group: name of the process group; "" is one rank.
        pad_size: tokens of padding at the end.
    """

    mask: AttnMask
    layout: Layout
    group: str
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    pad_size: int
    dist_attn_config: DistAttnConfig

    @property
    def comm(self) -> Comm:
        """This rank's side of the group."""
        return comm_by_name(self.group)

    @property
    def total_seqlen_q(self) -> int:
        """Tokens, padding included."""
        return self.mask.q_len

    @property
    def total_seqlen_k(self) -> int:
        """Tokens, padding included."""
        return self.mask.k_len


_most_recent: dict[str, DistAttnRuntimeKey] = {}


def magi_attn_flex_key(
    q_ranges: Any,
    k_ranges: Any,
    attn_mask_type: GeneralAttnMaskType,
    total_seqlen_q: int,
    total_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    pad_size: int = 0,
    cp_group_or_mesh: GroupLike | DeviceMesh = None,
    dist_attn_config: DistAttnConfig | None = None,
    is_same_source: bool = True,
    is_q_permutable: bool = True,
    is_k_permutable: bool = True,
    chunk_size: int | None = None,
) -> DistAttnRuntimeKey:
    """A key for self-attention under a mask of typed ranges. Its tokens are assigned so that all
    ranks have the same work.

    Args:
        q_ranges, k_ranges: AttnRanges, or pairs (start, end).
        attn_mask_type: "full", "causal", "inv_causal", "bi_causal" or AttnMaskType, for each range
            or for all.
        total_seqlen_q, total_seqlen_k: tokens without padding; equal.
        num_heads_q, num_heads_kv, head_dim: those of the tensors, which ``calc_attn`` checks.
        pad_size: tokens of padding to append. None are needed, since ranks may hold different
            numbers of tokens; :func:`.ranges.compute_pad_size` gives the number that evens them.
        cp_group_or_mesh: a ProcessGroup, a mesh of one or two axes, global ranks, or None.
        chunk_size: as ``DispatchConfig(chunk_size=)``; deprecated in MagiAttention too.
    Raises:
        MaskError: invalid ranges, or ranges that cover a pair twice.
        ArgumentError: another invalid argument.
        NotImplementedError: is_same_source, is_q_permutable or is_k_permutable not True.
    """
    title = "magi_attn_flex_key"
    for name, value in (
        ("is_same_source", is_same_source),
        ("is_q_permutable", is_q_permutable),
        ("is_k_permutable", is_k_permutable),
    ):
        if value is not True:
            raise NotImplementedError(
                f"{title}: {name}={value!r}: keys are for self-attention, as in MagiAttention; "
                "wrap_masked_attn_func(layout=, k_layout=) attends from one sequence to another"
            )
    if total_seqlen_q != total_seqlen_k:
        raise ArgumentError(
            f"{title}: total_seqlen_q={total_seqlen_q} and total_seqlen_k={total_seqlen_k} must be "
            "equal: q and k are one sequence"
        )
    mask = mask_of_ranges(title, q_ranges, k_ranges, attn_mask_type, total_seqlen_q, total_seqlen_k)
    heads = (num_heads_q, num_heads_kv, head_dim)
    return _key(title, mask, heads, pad_size, cp_group_or_mesh, dist_attn_config, chunk_size)


def magi_attn_varlen_key(
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    pad_size: int = 0,
    cp_group_or_mesh: GroupLike | DeviceMesh = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    dist_attn_config: DistAttnConfig | None = None,
    chunk_size: int | None = None,
) -> DistAttnRuntimeKey:
    """As :func:`magi_attn_flex_key`, for packed documents.

    Args:
        cu_seqlens_q, cu_seqlens_k: cumulative lengths, as tensors or lists; of the same total.
        causal, window_size: apply within each document; not both.
    """
    title = "magi_attn_varlen_key"
    mask = mask_of_documents(title, cu_seqlens_q, cu_seqlens_k, causal, window_size)
    if mask.q_len != mask.k_len:
        raise ArgumentError(
            f"{title}: cu_seqlens_q ends at {mask.q_len} and cu_seqlens_k at {mask.k_len}; q and k "
            "are one sequence"
        )
    heads = (num_heads_q, num_heads_kv, head_dim)
    return _key(title, mask, heads, pad_size, cp_group_or_mesh, dist_attn_config, chunk_size)


def make_flex_key_for_new_mask_after_dispatch(
    q_ranges: Any,
    k_ranges: Any,
    attn_mask_type: GeneralAttnMaskType,
    key_for_dispatch: DistAttnRuntimeKey,
    num_heads_q: int | None = None,
    num_heads_kv: int | None = None,
    head_dim: int | None = None,
    dist_attn_config: DistAttnConfig | None = None,
) -> DistAttnRuntimeKey:
    """A key with another mask, for tokens that another key has already dispatched.

    Work is balanced for the first mask. If it is uneven for this one, the new key's plan moves
    rows.

    Args:
        num_heads_q, num_heads_kv, head_dim: None for those of ``key_for_dispatch``.
        dist_attn_config: must have the dispatch of ``key_for_dispatch``, which placed the tokens.
    Raises:
        as :func:`magi_attn_flex_key`.
    """
    title = "make_flex_key_for_new_mask_after_dispatch"
    total = key_for_dispatch.total_seqlen_q - key_for_dispatch.pad_size
    mask = mask_of_ranges(title, q_ranges, k_ranges, attn_mask_type, total, total)
    heads = {"num_heads_q": num_heads_q, "num_heads_kv": num_heads_kv, "head_dim": head_dim}
    return _new_mask(title, mask, key_for_dispatch, heads, dist_attn_config)


def make_varlen_key_for_new_mask_after_dispatch(
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens,
    key_for_dispatch: DistAttnRuntimeKey,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    dist_attn_config: DistAttnConfig | None = None,
) -> DistAttnRuntimeKey:
    """As :func:`make_flex_key_for_new_mask_after_dispatch`, for packed documents."""
    title = "make_varlen_key_for_new_mask_after_dispatch"
    mask = mask_of_documents(title, cu_seqlens_q, cu_seqlens_k, causal, window_size)
    return _new_mask(title, mask, key_for_dispatch, {}, dist_attn_config)


def get_most_recent_key(cp_group: GroupLike | DeviceMesh = None) -> DistAttnRuntimeKey:
    """The key that was made last for a group.

    Raises:
        ArgumentError: no key was made for the group.
    """
    group = group_name(group_of("get_most_recent_key", cp_group, axes=2))
    if group not in _most_recent:
        raise ArgumentError(f"get_most_recent_key: no key was made for the group {group!r}")
    return _most_recent[group]


def clear_cache(cp_group: GroupLike | DeviceMesh = None) -> None:
    """Forget the most recent key of a group, or of all groups with None. Keys stay valid."""
    if cp_group is None:
        _most_recent.clear()
    else:
        _most_recent.pop(group_name(group_of("clear_cache", cp_group, axes=2)), None)


def _key(
    title: str,
    mask: AttnMask,
    heads: tuple[int, int, int],
    pad_size: int,
    where: GroupLike | DeviceMesh,
    config: DistAttnConfig | None,
    chunk_size: int | None,
) -> DistAttnRuntimeKey:
    config = DistAttnConfig() if config is None else config
    how = config.dispatch_config
    if chunk_size is not None:
        if how.chunk_size not in (None, chunk_size):
            raise ArgumentError(
                f"{title}: chunk_size={chunk_size}, but dist_attn_config says {how.chunk_size}"
            )
        warnings.warn(
            f"{title}: chunk_size is deprecated: DispatchConfig(chunk_size={chunk_size})",
            DeprecationWarning,
            stacklevel=3,
        )
        how = replace(how, chunk_size=chunk_size)
        config = replace(config, dispatch_config=how)
    require(is_integer(pad_size), title, "pad_size", "a number of tokens", pad_size)
    if pad_size and how.uneven_shard:
        raise ArgumentError(f"{title}: pad_size={pad_size}, but uneven_shard=True pads nothing")
    group = group_name(group_of(title, where, axes=2))
    mask = _padded(mask, pad_size)
    layout = dispatch_layout(mask, comm_by_name(group).size, how)
    return _checked(title, DistAttnRuntimeKey(mask, layout, group, *heads, pad_size, config))


def _new_mask(
    title: str,
    mask: AttnMask,
    old: DistAttnRuntimeKey,
    heads: dict[str, int | None],
    config: DistAttnConfig | None,
) -> DistAttnRuntimeKey:
    total = old.total_seqlen_q - old.pad_size
    if (mask.q_len, mask.k_len) != (total, total):
        raise ArgumentError(
            f"{title}: the mask is of {mask.q_len} x {mask.k_len} tokens, but {total} were "
            "dispatched"
        )
    if config is not None and config.dispatch_config != old.dist_attn_config.dispatch_config:
        raise ArgumentError(
            f"{title}: dist_attn_config deals tokens by {config.dispatch_config}, but they were "
            f"assigned by {old.dist_attn_config.dispatch_config}"
        )
    given: dict[str, Any] = {name: n for name, n in heads.items() if n is not None}
    return _checked(title, replace(old, mask=_padded(mask, old.pad_size), **given))


def _padded(mask: AttnMask, pad_size: int) -> AttnMask:
    return mask.shift(0, 0, mask.q_len + pad_size, mask.k_len + pad_size) if pad_size else mask


def _checked(title: str, key: DistAttnRuntimeKey) -> DistAttnRuntimeKey:
    """Check a key's heads; the key is its group's most recent one from now on."""
    for name in ("num_heads_q", "num_heads_kv", "head_dim"):
        value = getattr(key, name)
        require(is_integer(value, 1), title, name, "an integer of at least 1", value)
    if key.num_heads_q % key.num_heads_kv:
        raise ArgumentError(
            f"{title}: num_heads_q={key.num_heads_q} must be a multiple of "
            f"num_heads_kv={key.num_heads_kv}"
        )
    _most_recent[key.group] = key
    return key
