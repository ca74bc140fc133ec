"""MagiAttention's attention on one device, and what it shares with the one over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.mask import AttnMask
from ...masked_attn import wrap_masked_attn_func
from ...op.arguments import ArgumentError, require
from ...op.tokens.lengths import on_host
from ..peer_calls import refuse
from .ranges import mask_of_ranges

# Arguments that tune MagiAttention's own kernel, with the only value that is accepted here.
TUNING: dict[str, Any] = {
    "index_attn_indices": None,
    "q_block_size": 1,
    "k_block_size": 1,
    "sm_margin": 0,
    "ref_block_size": None,
    "swap_ab": False,
    "pack_gqa": False,
    "cat_gqa": False,
    "sparse_load": False,
    "index_attn": False,
    "swap_bwd_qk_loop": False,
}
REFUSED = {"return_max_logits": "return_max_logits={value}: no kernel here tells the largest score"}


@dataclass
class AttnForwardMeta:
    """What is returned beside the output.

    Attributes:
        lse: [l, h], natural log, fp32 (fp64 for fp64), of this rank's rows; differentiable.
        max_logits: None.
    """

    lse: Tensor | None
    max_logits: Tensor | None = None


def flex_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ranges: Tensor | None = None,
    k_ranges: Tensor | None = None,
    attn_type_map: Tensor | None = None,
    *,
    sink: Tensor | None = None,
    sink_layout: str = "sh",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    return_max_logits: bool = False,
    max_seqlen_q: int | None = None,
    auto_range_merge: bool = False,
    disable_fwd_atomic_reduction: bool = False,
    disable_bwd_dkv_atomic_reduction: bool = False,
    **tuning: Any,
) -> tuple[Tensor, AttnForwardMeta]:
    """``l (g n) hd^, m g hd^, m g vd^ -> l (g n) vd^``: attention on one device.

    Args:
        q_ranges, k_ranges: integers [n, 2]; on a device they are copied to the host once, and again
            if they change. attn_type_map: integers [n], 0 full, 1 causal, 2 inverse causal, 3 both;
            None is full.
        sink: as in :func:`calc_attn`; sink_layout: only "sh".
        deterministic: gradients are the same bit for bit from run to run.
        max_seqlen_q: the longest range of queries; None for any.
        auto_range_merge: ignored; adjacent key ranges are always merged.
            disable_fwd_atomic_reduction, disable_bwd_dkv_atomic_reduction: promises about ranges
            that change no result, and are not needed.
        tuning: as in :data:`TUNING`; anything else is refused.
    Raises:
        NotImplementedError: an argument that has no meaning here; the message says why.
        MaskError: invalid ranges, or ranges that cover a pair twice.
    """
    title = "flex_flash_attn_func"
    refuse(title, REFUSED, return_max_logits=bool(return_max_logits))
    _refuse_tuning(title, tuning)
    for name, each in (("q_ranges", q_ranges), ("k_ranges", k_ranges)):
        fits = isinstance(each, Tensor) and each.ndim == 2 and each.shape[1] == 2
        require(fits, title, name, "a tensor [n, 2]", each)
    of_integers = {"q_ranges": q_ranges, "k_ranges": k_ranges, "attn_type_map": attn_type_map}
    for name, given in of_integers.items():
        fits = given is None or (isinstance(given, Tensor) and not given.is_floating_point())
        require(fits, title, name, "a tensor of integers", given)
    assert q_ranges is not None and k_ranges is not None
    if sink_layout != "sh":
        raise NotImplementedError(f"{title}: sink_layout={sink_layout!r}: sinks are [s, h], 'sh'")
    longest = int(np.diff(on_host(q_ranges)).max(initial=0))
    if max_seqlen_q is not None and max_seqlen_q < longest:
        raise ArgumentError(f"{title}: max_seqlen_q={max_seqlen_q}, a range has {longest} tokens")
    if attn_type_map is None:
        attn_type_map = torch.zeros(len(q_ranges), dtype=torch.int32)
    ranges = tuple(on_host(each).tobytes() for each in (q_ranges, k_ranges, attn_type_map))
    mask = _mask_of_bytes(title, *ranges, q.shape[0], k.shape[0])
    options = {"softmax_scale": softmax_scale, "softcap": softcap, "deterministic": deterministic}
    return attention(q, k, v, mask, sink, **options)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AttnMask, sink: Tensor | None, **options: Any
) -> tuple[Tensor, AttnForwardMeta]:
    """Attention and its lse. Several sink tokens act as one: a row's sum gets the sum of their
    exponentials."""
    if sink is not None and sink.ndim == 2:
        sink = sink.logsumexp(0)
    out, lse = wrap_masked_attn_func(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), mask, sink=sink, return_lse=True, **options
    )
    return out.squeeze(0), AttnForwardMeta(lse.squeeze(0).transpose(0, 1))


@lru_cache(maxsize=64)
def _mask_of_bytes(
    title: str, q_ranges: bytes, k_ranges: bytes, types: bytes, q_len: int, k_len: int
) -> AttnMask:
    q, k, kinds = (np.frombuffer(each, dtype=np.int64) for each in (q_ranges, k_ranges, types))
    return mask_of_ranges(title, q.reshape(-1, 2), k.reshape(-1, 2), kinds.tolist(), q_len, k_len)


def _refuse_tuning(title: str, tuning: dict[str, Any]) -> None:
    for name, value in tuning.items():
        if name not in TUNING:
            raise TypeError(f"{title}: there is no argument {name!r}")
        if value is not TUNING[name] and value != TUNING[name]:
            raise NotImplementedError(
                f"{title}: {name} is for MagiAttention's own kernel; leave it {TUNING[name]!r}"
            )
