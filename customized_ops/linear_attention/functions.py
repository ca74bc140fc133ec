"""Linear attention and the gated delta rule: what users call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from annotations.codegen.public_call import declare_call
from annotations.consistency import digest
from annotations.registry import AnnotatedOp, OpRecord

from ..along_sequence.arguments import check_tensors, checked_documents, checked_segments, facts_of
from ..along_sequence.rule import public_call
from ..along_sequence.segments import Segments
from ..ring_attention.core.comm.comm_groups import GroupLike, group_name
from ..ring_attention.core.layout import Layout
from ..ring_attention.op.arguments import ArgumentError, checked, flag_of, require
from ..ring_attention.op.tokens.lengths import CuSeqlens
from .kernels import CHOICE
from .op import GATED_DELTA_RULE, GATED_LINEAR_ATTN


def wrap_gated_delta_rule_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: CuSeqlens | None = None,
    process_group: GroupLike = None,
    *,
    layout: Layout | None = None,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """``b l g dk^, b l g dk^, b l (g n) dv^, b l (g n), b l (g n) -> b l (g n) dv^``

    The gated delta rule (Gated DeltaNet; with a decay for each channel Kimi Delta Attention) over a
    sequence whose tokens are cut across the ranks of a group. With S a document's state, [dk, dv],
    which starts at 0 or ``initial_state``, each token in turn computes

        S <- e^g S;    S <- S + k (β (v - Sᵀ k))ᵀ;    out = scale Sᵀ q

    A rank's part of a document is a map of the state that enters it, S -> A S + b:

        rank 0: tokens 0 1 2 3  -- b -->  rank 1: 4 5 6 7  -- A, b -->  rank 2: 8 9 10 11

    Args:
        q, k: [b, l, h, dk], this rank's tokens; any strides. Nothing is normalised here.
        v: [b, l, hv, dv]; hv is a multiple of h, and head n of v goes with head n // (hv / h) of q.
        g: [b, l, hv] or [b, l, hv, dk], natural logs of decays, finite and at most 0; in q's dtype
            or fp32. beta: [b, l, hv], in q's dtype or fp32.
        scale: what q is multiplied by; None means 1 / sqrt(dk).
        initial_state: [b, hv, dk, dv], the same on every rank; [documents, hv, dk, dv] with
            ``cu_seqlens``. On each rank its gradient is a part: add up over the group.
        output_final_state: also return the states after the last tokens, on every rank; for a
            document without tokens, its initial state. Gradients of all ranks' copies are added up.
        cu_seqlens: [documents + 1], int32 or int64, cumulative lengths of the whole sequence, the
            same on every rank; b is then 1. Each document has a state of its own.
        process_group: ranks over which l is cut: a ProcessGroup, its global ranks in increasing
            order, or None. Leave it None under an auto-parallelizer, which fills it in.
        layout: which tokens each rank holds; None means contiguous shards, which have equal sizes
            unless ``cu_seqlens`` is given.
        kernel: ``"auto"``, ``"fla"`` (flash-linear-attention) or ``"torch"``.
    Returns:
        [b, l, hv, dv] in v's dtype; with ``output_final_state`` also [b or documents, hv, dk, dv]
        in fp32 (fp64 for fp64), as all states are.

    Communication: ranks that share a document exchange maps of states in the forward, and of their
    gradients in the backward; the number of bytes does not depend on the number of tokens. Final
    states are added up over the group.

    Raises:
        ValueError: shapes, dtypes, lengths, layout or group do not fit; the message says what
            would. Raised before anything is computed or sent.

    Yang, Kautz, Hatamizadeh: Gated Delta Networks, arXiv:2412.06464 (2024); Kimi Linear,
    arXiv:2510.26692 (2025). Chunks: equations in ``kernels/torch_chunks.py``.
    """
    title, tensors = "wrap_gated_delta_rule_func", {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    states = initial_state, output_final_state
    where = cu_seqlens, process_group, layout
    return _call(title, GATED_DELTA_RULE, tensors, scale, states, where, kernel)


def wrap_gated_linear_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: CuSeqlens | None = None,
    process_group: GroupLike = None,
    *,
    layout: Layout | None = None,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """``b l g dk^, b l g dk^, b l (g n) dv^, b l (g n) -> b l (g n) dv^``

    Gated linear attention over a sequence whose tokens are cut across the ranks of a group. With a
    decay for each head this is Mamba-2's state space (q, k, v are its C, B and Δ x, g is Δ A, scale
    is 1); with one for each channel, GLA. Each token in turn computes

        S <- e^g S + k vᵀ;    out = scale Sᵀ q

    Arguments, results, communication and errors are those of :func:`wrap_gated_delta_rule_func`;
    the A of a rank's part is diagonal.

    Dao and Gu: Transformers are SSMs, arXiv:2405.21060 (2024); Yang et al.: Gated Linear Attention,
    arXiv:2312.06635 (2023).
    """
    title, tensors = "wrap_gated_linear_attn_func", {"q": q, "k": k, "v": v, "g": g}
    states = initial_state, output_final_state
    where = cu_seqlens, process_group, layout
    return _call(title, GATED_LINEAR_ATTN, tensors, scale, states, where, kernel)


def _call(
    title: str,
    ops: Mapping[bool, AnnotatedOp],
    tensors: dict[str, Tensor],
    scale: float | None,
    states: tuple[Tensor | None, bool],
    where: tuple[CuSeqlens | None, GroupLike, Layout | None],
    kernel: str,
) -> Tensor | tuple[Tensor, Tensor]:
    (initial, output), (cu_seqlens, group, layout) = states, where

    def check() -> tuple[AnnotatedOp, dict[str, Any], Segments | None]:
        final = flag_of(title, "output_final_state", output)
        optional = {} if initial is None else {"initial_state": initial}
        check_tensors(title, {**tensors, **optional})
        _check_dtypes(title, {**tensors, **optional})
        require(isinstance(kernel, str), title, "kernel", "the name of one, or 'auto'", kernel)
        CHOICE.check_name(title, kernel)
        lengths = checked_documents(title, tensors["q"], cu_seqlens, group)
        state = {"initial_state": initial, "output_final_state": final}
        rest = {"cu_seqlens": lengths, "scale": scale, "kernel": kernel}
        op, given = _op_of(title, ops, {**tensors, **state, **rest})
        if not torch.compiler.is_compiling():
            op.record.bind(given)
        local = tensors["q"].shape[1]
        spec, segments = checked_segments(title, local, lengths, layout, group)
        return op, {**given, "layout": spec, "group": group_name(group)}, segments

    def facts(found: tuple[AnnotatedOp, dict[str, Any], Segments | None]) -> dict[str, str]:
        _, given, segments = found
        numbers = {name: str(given[name]) for name in ("scale", "kernel")}
        numbers["output_final_state"] = str(output)
        numbers["initial_state"] = "None" if initial is None else digest(initial)
        return {**facts_of(segments, tensors), **numbers}

    op, given, _ = checked(title, group, check, facts)
    results = op(*(given[name] for name in op.record.signature.parameters))
    return (results[0], results[1]) if output else results[0]


def _check_dtypes(title: str, given: Mapping[str, Tensor]) -> None:
    q = given["q"]
    for name, tensor in given.items():
        allowed = (q.dtype,) if name in ("q", "k", "v") else (q.dtype, torch.float32)
        if tensor.dtype not in allowed:
            raise ArgumentError(
                f"{title}: {name} is {tensor.dtype} but q is {q.dtype}; give "
                f"{' or '.join(map(str, dict.fromkeys(allowed)))}"
            )


def _scale(title: str, scale: float | None, q: Tensor) -> float:
    if scale is None:
        return float(max(int(q.shape[-1]), 1) ** -0.5)
    numeric = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    require(numeric and math.isfinite(scale), title, "scale", "a finite number or None", scale)
    return float(scale)


def _op_of(
    title: str, ops: Mapping[bool, AnnotatedOp], given: Mapping[str, Any]
) -> tuple[AnnotatedOp, dict[str, Any]]:
    """The op that a call takes, and its arguments on one device."""
    op = ops[bool(given["output_final_state"]) or given["initial_state"] is not None]
    filled = {"beta": None, **given, "layout": "", "group": ""}
    filled["scale"] = _scale(title, given["scale"], given["q"])
    return op, {name: filled[name] for name in op.record.signature.parameters}


def _record_of(
    title: str, ops: Mapping[bool, AnnotatedOp], given: Mapping[str, Any]
) -> tuple[OpRecord, dict[str, Any]]:
    """For engines that generate code."""
    op, arguments = _op_of(title, ops, given)
    return op.record, arguments


for _function, _ops in (
    (wrap_gated_delta_rule_func, GATED_DELTA_RULE),
    (wrap_gated_linear_attn_func, GATED_LINEAR_ATTN),
):
    declare_call(
        public_call(
            _function,
            partial(_record_of, _function.__name__, _ops),
            lambda given: 2 if given["output_final_state"] else 1,
            "q",
        )
    )
