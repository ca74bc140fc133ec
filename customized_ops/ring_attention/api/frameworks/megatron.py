"""Megatron-Core's core attention over a context-parallel group.

Name ``RingCoreAttention`` as ``core_attention`` in a layer spec, in place of
``TEDotProductAttention``; it has the arguments of that class in megatron-core 0.16.1. Megatron is
not needed to import this. Tokens stay in the zigzag shards of TransformerEngine; packed sequences
are each cut into zigzag shards.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...core.layout import Layout
from ...op.tokens.lengths import on_host
from ...ring_attn_varlen import wrap_ring_attn_varlen_func
from ...zigzag_attn import wrap_zigzag_attn_func

REFUSED_FLAGS = ("qk_clip", "log_max_attention_logit", "batch_invariant_mode")
CAUSAL = ("causal", "causal_bottom_right")  # the same for equal numbers of queries and keys
PACKED = {"padding_causal": "causal", "padding": "no_mask"}  # names for packed sequences


def refuse(what: str, value: Any, reason: str) -> None:
    """Raise for an argument that this attention does not support."""
    raise NotImplementedError(f"RingCoreAttention: {what}={value!r}: {reason}")


def name_of(mask_type: Any, packed: bool = False) -> str:
    """The name of a Megatron ``AttnMaskType``, which may be given as its name."""
    name: str = getattr(mask_type, "name", mask_type)
    if packed:
        name = PACKED.get(name, name)
    if name not in (*CAUSAL, "no_mask"):
        refuse("attn_mask_type", name, f"there are {', '.join(CAUSAL)} and no_mask")
    return name


class RingCoreAttention(nn.Module):
    """Self-attention over ``pg_collection.cp``, with the arguments of ``TEDotProductAttention``.

    Args:
        config: Megatron's ``TransformerConfig``. It provides ``window_size`` with
            ``window_attn_skip_freq``, ``softmax_type`` (a sink), ``deterministic_mode`` and, where
            the argument is None, ``attention_dropout``. ``apply_query_key_layer_scaling`` changes
            no result, and scores are fp32 here.
        k_channels, v_channels: head dims; tensors are checked against them.
        cp_comm_type: None or "p2p". Either way, the plan decides what moves.
        pg_collection: its ``cp`` is the group if ``config.context_parallel_size`` is not 1.
    Raises:
        NotImplementedError: a feature that this attention lacks. ValueError: there is no group.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = "p2p",
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            refuse("attention_dropout", dropout, "it needs a seed that the ranks share")
        if attention_type != "self":
            refuse("attention_type", attention_type, "keys are the queries' tokens")
        if num_splits not in (None, 1):
            refuse("num_splits", num_splits, "the plan cuts the work")
        if cp_comm_type not in (None, "p2p"):
            refuse("cp_comm_type", cp_comm_type, "the plan decides what moves; leave it out")
        for flag in REFUSED_FLAGS:
            if getattr(config, flag, False):
                refuse(f"config.{flag}", True, "not done here")
        self.config, self.mask_type = config, name_of(attn_mask_type)
        self.softmax_scale, self.channels = softmax_scale, (k_channels, v_channels)
        ranks, self.group = config.context_parallel_size, getattr(pg_collection, "cp", None)
        if ranks > 1 and self.group is None:
            raise ValueError(f"RingCoreAttention: {ranks} ranks need a pg_collection with cp")
        there = 1 if self.group is None else dist.get_world_size(self.group)
        if there != ranks:
            raise ValueError(
                f"RingCoreAttention: context_parallel_size={ranks}, pg_collection.cp has {there}"
            )
        self.window: tuple[int, int] = (-1, -1)
        skip = getattr(config, "window_attn_skip_freq", None)
        own = skip[layer_number - 1] if isinstance(skip, list) else not skip or layer_number % skip
        if getattr(config, "window_size", None) and own:
            self.window = tuple(config.window_size)
        self._add_sink(getattr(config, "softmax_type", "vanilla"))

    def _add_sink(self, softmax_type: str) -> None:
        """A logit for each head of this rank that joins the softmax and has no value."""
        if softmax_type == "vanilla":
            self.softmax_offset = None
            return
        if softmax_type not in ("off-by-one", "learnable"):
            refuse("config.softmax_type", softmax_type, "it is vanilla, off-by-one or learnable")
        heads = self.config.num_attention_heads // self.config.tensor_model_parallel_size
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        zeros = torch.zeros(heads, dtype=self.config.params_dtype, device=device)
        if softmax_type == "off-by-one":
            self.register_buffer("softmax_offset", zeros, persistent=False)
        else:
            self.softmax_offset = nn.Parameter(self.config.init_method(zeros))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """``s b (g n) d, s b g d, s b g e -> s b ((g n) e)``, tokens in zigzag shards of a group;
        packed, ``t (g n) d, t g d, t g e -> t ((g n) e)``, each sequence in such shards.

        Args:
            attention_mask: None; the mask type alone says which tokens attend.
            attn_mask_type: None takes the constructor's.
            packed_seq_params: of format "thd": cu_seqlens_q and, if sequences are padded to a
                multiple of twice the ranks, cu_seqlens_q_padded, of all ranks' tokens. Results of
                padding rows are meaningless. Its cp_group is None or the constructor's.
        Raises:
            NotImplementedError: a feature that this attention lacks. ValueError: other head dims,
                or sequence lengths that are not divisible by twice the ranks.
        """
        given = {"attention_mask": attention_mask, "attention_bias": attention_bias}
        for what, it in given.items():
            if it is not None:
                refuse(what, type(it).__name__, "leave it out; attn_mask_type alone is the mask")
        if num_splits not in (None, 1):
            refuse("num_splits", num_splits, "the plan cuts the work")
        packed = packed_seq_params is not None
        kind = name_of(self.mask_type if attn_mask_type is None else attn_mask_type, packed)
        for what, t, wide in zip(("key", "value"), (key, value), self.channels, strict=True):
            if wide not in (None, t.shape[-1]):
                raise ValueError(f"RingCoreAttention: {what} {tuple(t.shape)} has no dim {wide}")
        options: dict[str, Any] = {
            "softmax_scale": self.softmax_scale,
            "causal": kind in CAUSAL,
            "window_size": self.window,
            "deterministic": getattr(self.config, "deterministic_mode", False),
            "process_group": self.group,
            "sink": self.softmax_offset,
        }
        size = 1 if self.group is None else dist.get_world_size(self.group)
        if packed:
            return self._packed(query, key, value, packed_seq_params, options, size)
        options["layout"] = Layout.zigzag(query.shape[0] * size, size)
        q, k, v = (t.transpose(0, 1) for t in (query, key, value))
        out: Any = wrap_zigzag_attn_func(q, k, v, **options)
        return out.transpose(0, 1).flatten(2)

    def _packed(
        self, q: Tensor, k: Tensor, v: Tensor, params: Any, options: dict[str, Any], size: int
    ) -> Tensor:
        self._check_packed(params, options["causal"])
        padded = params.cu_seqlens_q_padded
        cu_seqlens = params.cu_seqlens_q if padded is None else padded
        bounds = on_host(torch.as_tensor(cu_seqlens))
        parts = 1 if size == 1 else 2 * size
        lengths = bounds[1:] - bounds[:-1]
        if (lengths % parts).any() or bounds[-1] != len(q) * size:
            raise ValueError(
                f"RingCoreAttention: sequences of {lengths.tolist()} tokens in packed_seq_params, "
                f"of which this rank has {len(q)}; pad each to a multiple of {parts} for {size} "
                "ranks"
            )
        options["layout"] = Layout.zigzag(int(bounds[-1]), size, bounds)
        out: Any = wrap_ring_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, **options)
        return out.flatten(1)

    def _check_packed(self, params: Any, causal: bool) -> None:
        if getattr(params, "qkv_format", None) != "thd":
            found = getattr(params, "qkv_format", type(params).__name__)
            refuse("packed_seq_params.qkv_format", found, "it is 'thd'")
        if not causal and params.cu_seqlens_q_padded is not None:
            refuse(
                "packed_seq_params.cu_seqlens_q_padded",
                type(params.cu_seqlens_q_padded).__name__,
                "without a causal mask padding would be attended",
            )
        for what in ("cu_seqlens_kv", "cu_seqlens_kv_padded"):
            theirs, ours = getattr(params, what), getattr(params, what.replace("kv", "q"))
            if theirs is not None and theirs is not ours and not _equal(theirs, ours):
                refuse(f"packed_seq_params.{what}", theirs, "keys are the queries' tokens")
        if getattr(params, "cp_group", None) not in (None, self.group):
            refuse("packed_seq_params.cp_group", params.cp_group, "it is not pg_collection.cp")


def _equal(a: Any, b: Any) -> bool:
    return b is not None and np.array_equal(
        on_host(torch.as_tensor(a)), on_host(torch.as_tensor(b))
    )
