"""The short convolution: what users call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from annotations.codegen.public_call import declare_call
from annotations.registry import OpRecord

from ..along_sequence.arguments import check_tensors, checked_documents, checked_segments, facts_of
from ..along_sequence.rule import public_call
from ..along_sequence.segments import Segments
from ..ring_attention.core.comm.comm_groups import GroupLike, group_name
from ..ring_attention.core.layout import Layout
from ..ring_attention.op.arguments import ArgumentError, checked, require
from ..ring_attention.op.tokens.lengths import CuSeqlens
from .kernels import ACTIVATIONS, CHOICE
from .op import TITLE, causal_conv1d


def wrap_causal_conv1d_func(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: CuSeqlens | None = None,
    process_group: GroupLike = None,
    *,
    layout: Layout | None = None,
    kernel: str = "auto",
) -> Tensor:
    """``b l d, d w^, d -> b l d``

    A causal convolution of each channel along a sequence whose tokens are cut across the ranks of a
    group, as before the attention of Mamba, Gated DeltaNet and their successors:

        y_t = act(bias + Σ_j weight_j x_{t - w + 1 + j}), tokens before the document being 0

    Args:
        x: [b, l, d], this rank's tokens; any strides.
        weight: [d, w], whole on every rank, and bias: [d] or None; in x's dtype or fp32. On each
            rank their gradients are those of its tokens: add up over the group.
        activation: None, ``"silu"`` or ``"swish"``, which is the same.
        cu_seqlens: [documents + 1], int32 or int64, cumulative lengths of the whole sequence, the
            same on every rank; b is then 1. Nothing passes from one document to the next.
        process_group: ranks over which l is cut: a ProcessGroup, its global ranks in increasing
            order, or None. Leave it None under an auto-parallelizer, which fills it in.
        layout: which tokens each rank holds; None means contiguous shards, which have equal sizes
            unless ``cu_seqlens`` is given.
        kernel: ``"auto"``, or the name of one.
    Returns:
        [b, l, d] in x's dtype; sums are in fp32 (fp64 for fp64).

    Communication: each run of a rank's tokens gets the w - 1 tokens before it, from however many
    ranks hold them. The backward fetches them again, and sends their gradients back to the owners,
    which add them.

    Raises:
        ValueError: shapes, dtypes, lengths, layout, group or kernel do not fit; the message says
            what would. Raised before anything is computed or sent.

    Gu and Dao: Mamba, arXiv:2312.00752 (2023), section 3.4.
    """
    tensors = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})

    def check() -> tuple[Tensor | None, str, Segments | None]:
        check_tensors(TITLE, tensors)
        for name, tensor in tensors.items():
            if tensor.dtype not in (x.dtype, torch.float32):
                raise ArgumentError(
                    f"{TITLE}: {name} is {tensor.dtype} but x is {x.dtype}; give one dtype, or "
                    "weight and bias in fp32"
                )
        known, fits = "None, 'silu' or 'swish'", activation in (None, *ACTIVATIONS[1:])
        require(fits, TITLE, "activation", known, activation)
        require(isinstance(kernel, str), TITLE, "kernel", "the name of one, or 'auto'", kernel)
        CHOICE.check_name(TITLE, kernel)
        shape, wanted = tuple(weight.shape), "[d, w] (of nn.Conv1d its .squeeze(1)), w of 1 or more"
        require(len(shape) == 2 and shape[1] > 0, TITLE, "weight", wanted, shape)
        lengths = checked_documents(TITLE, x, cu_seqlens, process_group)
        if not torch.compiler.is_compiling():
            causal_conv1d.record.bind({"bias": None, **tensors, "cu_seqlens": lengths})
        return lengths, *checked_segments(TITLE, x.shape[1], lengths, layout, process_group)

    def facts(found: tuple[Tensor | None, str, Segments | None]) -> dict[str, str]:
        own = {name: t for name, t in tensors.items() if name != "x"}
        shapes = {name: f"{tuple(t.shape)} {t.dtype}" for name, t in own.items()}
        options = {"activation": str(activation), "kernel": kernel}
        return {**facts_of(found[2], {"x": x}), **shapes, **options}

    lengths, spec, _ = checked(TITLE, process_group, check, facts)
    where = lengths, activation or "", kernel, spec, group_name(process_group)
    return causal_conv1d(x, weight, bias, *where)


def _op(given: Mapping[str, Any]) -> tuple[OpRecord, dict[str, Any]]:
    names = ("x", "weight", "bias", "cu_seqlens", "kernel")
    numbers = {"activation": given["activation"] or "", "layout": "", "group": ""}
    return causal_conv1d.record, {**{name: given[name] for name in names}, **numbers}


declare_call(public_call(wrap_causal_conv1d_func, _op, lambda given: 1, "x"))
