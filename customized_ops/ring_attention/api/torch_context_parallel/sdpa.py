"""torch's two attention functions for a sequence that is cut across ranks.

Their tensors are [b, h, l, d] and those of the ops [b, l, h, d]: these are transposed views, and
nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask
from torch.utils.weak import WeakIdKeyDictionary

from ...core.comm import Comm
from ...core.comm.comm_groups import GroupLike, group_comm
from ...core.layout import Layout
from ...core.mask import AttnMask
from ...masked_attn import wrap_masked_attn_func
from ...op.arguments import ArgumentError, checked
from ...ring_attn import wrap_ring_attn_func
from ..peer_calls import refuse
from .block_mask import mask_of_block_mask

SDPA, FLEX = "scaled_dot_product_attention", "flex_attention"

FLEX_REFUSALS = {
    "score_mod": "score_mod is not taken: kernels change scores by a softcap or ALiBi alone, "
    "softcap= and alibi_slopes= of wrap_masked_attn_func",
    "kernel_options": "kernel_options are for torch's own kernel",
    "return_aux": "return_aux takes lse=True alone, and no return_lse beside it: no kernel here "
    "tells the largest score",
}
_known_masks: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by attn_mask, and its version


@dataclass(frozen=True)
class SequenceSharding:
    """How the sequence is cut: over which ranks, which tokens each holds (None: equal numbers in
    order), and which kernel computes its attention."""

    group: GroupLike = None
    layout: Layout | None = None
    kernel: str = "auto"

    @property
    def comm(self) -> Comm:
        """This rank's side of the group."""
        return group_comm(self.group)

    def total(self, local: int) -> int:
        """Tokens over all ranks."""
        return local * self.comm.size if self.layout is None else self.layout.total

    @property
    def options(self) -> dict[str, Any]:
        """The fields as arguments of the ops."""
        return {"process_group": self.group, "layout": self.layout, "kernel": self.kernel}


def sdpa(
    sharding: SequenceSharding,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``b (g n) l hd^, b g l hd^, b g l vd^ -> b (g n) l vd^``

    ``torch.nn.functional.scaled_dot_product_attention`` of the whole sequence, for this rank's
    rows.

    Args:
        query, key, value: this rank's tokens; the batch dim may be missing.
        attn_mask: of the whole sequence, [..., l, l] with leading dims of 1: bool, or numbers that
            are all 0 or -inf. It is read once, and again if it changes.
        dropout_p: what is dropped follows from a seed that rank 0 draws and sends, so it does not
            matter how the other ranks are seeded.
        scale: None for 1 / sqrt(hd).
        enable_gqa: query heads may be a multiple of key heads.
    Raises:
        ArgumentError: shapes do not fit; raised on every rank.
        NotImplementedError: a mask that adds to scores.
    """

    def check() -> AttnMask | None:
        _check_heads(SDPA, query, key, value, enable_gqa)
        if attn_mask is None:
            return None
        if is_causal:
            raise ArgumentError(f"{SDPA}: attn_mask with is_causal=True; give one of them")
        return _mask_of_tensor(attn_mask, sharding.total(query.shape[-2]))

    mask = checked(SDPA, sharding.group, check)
    q, k, v = (_rows_first(t) for t in (query, key, value))
    options = {"softmax_scale": scale, "dropout_p": dropout_p, **sharding.options}
    if dropout_p:
        options["dropout_seed"] = _common_seed(sharding.comm)
    out: Any
    if mask is None:
        out = wrap_ring_attn_func(q, k, v, causal=bool(is_causal), **options)
    else:
        out = wrap_masked_attn_func(q, k, v, mask, **options)
    return _heads_first(out, query.ndim)


def flex(
    sharding: SequenceSharding,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """``b (g n) l hd^, b g l hd^, b g l vd^ -> b (g n) l vd^``

    ``flex_attention`` of the whole sequence, for this rank's rows; see :func:`sdpa`.

    Args:
        block_mask: of the whole sequence; see :func:`.block_mask.mask_of_block_mask`.
        return_aux: may ask only for lse.
    Raises:
        NotImplementedError: score_mod, kernel_options, or max_scores.
        ArgumentError: shapes do not fit; raised on every rank.
    """

    def check() -> AttnMask:
        of_aux = return_aux is not None and (return_aux.max_scores or return_lse)
        given = {"score_mod": score_mod is not None, "kernel_options": bool(kernel_options)}
        refuse(FLEX, FLEX_REFUSALS, **given, return_aux=of_aux)
        _check_heads(FLEX, query, key, value, enable_gqa)
        total = sharding.total(query.shape[-2])
        mask = AttnMask.full(total) if block_mask is None else mask_of_block_mask(block_mask)
        if (mask.q_len, mask.k_len) != (total, total):
            raise ArgumentError(
                f"{FLEX}: block_mask is of {mask.q_len} x {mask.k_len} tokens, but the whole "
                f"sequence has {total}; make it for that"
            )
        return mask

    mask = checked(FLEX, sharding.group, check)
    q, k, v = (_rows_first(t) for t in (query, key, value))
    with_lse = return_lse or (return_aux is not None and return_aux.lse)
    got = wrap_masked_attn_func(
        q, k, v, mask, softmax_scale=scale, return_lse=with_lse, **sharding.options
    )
    out, lse = got if isinstance(got, tuple) else (got, None)
    out = _heads_first(out, query.ndim)
    if return_aux is not None:
        return out, AuxOutput(lse=lse, max_scores=None)
    return (out, lse) if return_lse else out


def _rows_first(t: Tensor) -> Tensor:
    return (t if t.ndim == 4 else t.unsqueeze(0)).transpose(1, 2)


def _heads_first(out: Tensor, ndim: int) -> Tensor:
    out = out.transpose(1, 2)
    return out if ndim == 4 else out.squeeze(0)


def _check_heads(title: str, query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    tensors = {"query": query, "key": key, "value": value}
    least = 3 if title == SDPA else 4
    for name, t in tensors.items():
        if not isinstance(t, Tensor) or not least <= t.ndim <= 4 or t.ndim != query.ndim:
            shape = tuple(getattr(t, "shape", ()))
            raise ArgumentError(f"{title}: {name} must be [b, h, l, d] as the others, got {shape}")
    heads = [t.shape[-3] for t in tensors.values()]
    if heads[1] != heads[2] or (heads[0] != heads[1] and not enable_gqa):
        raise ArgumentError(
            f"{title}: query, key and value have {heads} heads; enable_gqa=True lets the first be "
            "a multiple of the others"
        )


def _common_seed(comm: Comm) -> int:
    """The seed that rank 0 draws. Every rank draws one, so that equal generators stay equal."""
    own = int(torch.randint(2**62, (1,)).item())
    seed = comm.all_gather_object(own)[0]
    assert isinstance(seed, int)
    return seed


def _mask_of_tensor(attn_mask: Tensor, total: int) -> AttnMask:
    if not isinstance(attn_mask, Tensor):
        raise ArgumentError(f"{SDPA}: attn_mask must be a tensor, got {type(attn_mask).__name__}")
    lead, sizes = attn_mask.shape[:-2], attn_mask.shape[-2:]
    if tuple(sizes) != (total, total) or lead.numel() != 1:
        raise ArgumentError(
            f"{SDPA}: attn_mask of shape {tuple(attn_mask.shape)} must be the whole sequence's, "
            f"({total}, {total}) with leading dims of 1: one mask serves every batch entry and head"
        )
    version = None if attn_mask.is_inference() else attn_mask._version
    known = _known_masks.get(attn_mask)
    if known is None or version is None or known[0] != version:
        known = (version, AttnMask.from_dense(_attended(attn_mask.detach()).reshape(sizes).numpy()))
        _known_masks[attn_mask] = known
    return known[1]


def _attended(attn_mask: Tensor) -> Tensor:
    if attn_mask.dtype == torch.bool:
        return attn_mask.cpu()
    allowed = attn_mask == 0
    if not bool((allowed | (attn_mask == -np.inf)).all()):
        raise NotImplementedError(
            f"{SDPA}: attn_mask adds numbers to scores; only a mask of True and False, or of 0 and "
            "-inf, is one that says which pairs attend (ALiBi: alibi_slopes= of the wrap functions)"
        )
    return allowed.cpu()
