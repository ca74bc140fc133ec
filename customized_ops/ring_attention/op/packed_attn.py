"""The ops over packed documents: q, k, v [l, heads, d] and cumulative lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from annotations import AnnotatedOp

from ..core.comm import Comm
from ..core.comm.comm_groups import GroupLike
from ..core.mask import AttnMask
from ..varlen_utils import (
    CuSeqlens,
    as_tensor,
    check_cu_seqlens,
    check_max_seqlen,
    check_total,
    document_mask,
    document_positions,
    on_host,
    value_of,
)
from .arguments import ArgumentError, Options, flag_of, ring_group, tokens_of, window_bounds
from .attention_family import Arguments, Family, Problem, has_data
from .attention_layout import layout_of
from .attention_op import call_op
from .attention_repeat import Pattern
from .dense_attn import sequence_mask


def _problem(title: str, given: Arguments, rows: int, comm: Comm) -> Problem:
    """The totals come from ``cu_seqlens``, so no rank asks another."""
    cu = {}
    for side in "qk":
        cu[side] = on_host(given[f"cu_seqlens_{side}"])
        check_cu_seqlens(title, f"cu_seqlens_{side}", cu[side])
        longest = given[f"max_seqlen_{side}"]
        check_max_seqlen(title, f"max_seqlen_{side}", longest, cu[side])
    if len(cu["q"]) != len(cu["k"]):
        raise ArgumentError(
            f"{title}: cu_seqlens_q has {len(cu['q']) - 1} documents and cu_seqlens_k "
            f"{len(cu['k']) - 1}"
        )
    if comm.size == 1:
        check_total(title, "cu_seqlens_q", cu["q"], rows)
        check_total(title, "cu_seqlens_k", cu["k"], given["k"].shape[0])
    q_total, k_total = int(cu["q"][-1]), int(cu["k"][-1])
    spec, k_spec = given["layout"], given["k_layout"]
    if spec and not k_spec:
        if q_total != k_total:
            raise ArgumentError(
                f"{title}: layout={spec} is for q, but cu_seqlens_q end at {q_total} and "
                f"cu_seqlens_k at {k_total}; give k_layout too, or neither, and both are cut "
                "contiguously"
            )
        k_spec = spec
    q_layout = layout_of(title, comm, "layout", spec, rows, q_total)
    k_layout = layout_of(title, comm, "k_layout", k_spec, given["k"].shape[0], k_total)
    window = given["window_left"], given["window_right"]
    mask = document_mask(cu["q"], cu["k"], given["causal"], window, given["sink_tokens"])
    aligned = given["alibi_slopes"] is not None
    positions = document_positions(cu["q"], cu["k"]) if aligned else None
    return Problem(mask, q_layout, k_layout, positions)


def _known(given: Arguments, q_len: int, k_len: int) -> AttnMask | None:
    cu = given["cu_seqlens_q"], given["cu_seqlens_k"]
    if not all(map(has_data, cu)):
        return None
    ends = on_host(cu[0]), on_host(cu[1])
    if (ends[0][-1], ends[1][-1]) != (q_len, k_len):
        return None
    window = given["window_left"], given["window_right"]
    return document_mask(*ends, given["causal"], window, given["sink_tokens"])


PACKED = Family(
    packed=True,
    tensors={"cu_seqlens_q": "e^", "cu_seqlens_k": "f^"},
    numbers={
        "causal": bool,
        "window_left": int,
        "window_right": int,
        "sink_tokens": int,
        "max_seqlen_q": int,
        "max_seqlen_k": int,
    },
    same_length=False,
    problem=_problem,
    all_rows=lambda given: int(on_host(given["cu_seqlens_q"])[-1]),
    known=_known,
    # The lengths of documents are data, so one document as long as all.
    otherwise=sequence_mask,
)


def packed_attention(
    op: AnnotatedOp,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: CuSeqlens | None,
    cu_seqlens_k: CuSeqlens | None,
    options: Options,
    *,
    causal: bool,
    window_size: Sequence[int],
    enable_ring: bool,
    process_group: GroupLike,
    max_seqlens: tuple[int | None, int | None],
    sink_tokens: int = 0,
    **unsupported: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Check a user's call of a packed attention op and make it; out, and lse if asked for."""
    title = op.record.title

    def tensors() -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for side, cu in zip("qk", (cu_seqlens_q, cu_seqlens_k), strict=True):
            name = f"cu_seqlens_{side}"
            if cu is None:
                raise ArgumentError(f"{title}: {name} is missing; give both, for q and for k")
            found[name] = as_tensor(title, name, cu)
        return found

    def numbers() -> dict[str, Any]:
        if not flag_of(title, "enable_ring", enable_ring) and torch.compiler.is_compiling():
            raise NotImplementedError(
                f"{title}: enable_ring=False is not supported in a captured graph, where an engine "
                "gives the op its group"
            )
        left, right = window_bounds(title, window_size)
        longest = {}
        for side, most in zip("qk", max_seqlens, strict=True):
            name = f"max_seqlen_{side}"
            longest[name] = -1 if most is None else tokens_of(title, name, most)
        return {
            "causal": flag_of(title, "causal", causal),
            "window_left": left,
            "window_right": right,
            "sink_tokens": tokens_of(title, "sink_tokens", sink_tokens),
            **longest,
        }

    def values() -> tuple[Any, ...] | None:
        q_values = value_of(cu_seqlens_q)
        k_values = q_values if cu_seqlens_k is cu_seqlens_q else value_of(cu_seqlens_k)
        return None if q_values is None or k_values is None else (q_values, k_values)

    said = causal, window_size, sink_tokens, enable_ring, *max_seqlens
    group = ring_group(enable_ring, process_group)
    pattern = Pattern(said, numbers, tensors, values)
    return call_op(op, q, k, v, pattern, options, group, **unsupported)
