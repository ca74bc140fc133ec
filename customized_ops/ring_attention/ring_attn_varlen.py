"""Ring attention over packed documents of any lengths, cut anywhere across ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from annotations import register_op
from annotations.binding import BoundAnnotation
from annotations.rules import SplitSite

from .arguments import (
    ArgumentError,
    causal_of,
    check_tensors,
    checked,
    refuse_unsupported,
    scale_of,
    spec_of,
    window_bounds,
)
from .attention_op import (
    Call,
    Options,
    backward,
    forward,
    head_dims,
    layout_of,
    lse_like,
    resolve,
    sequence_rule,
)
from .core.comm import Comm
from .core.groups import GroupLike, group_name
from .core.layout import Layout
from .core.mask import AttnMask
from .core.plan import Plan, make_plan
from .varlen_utils import (
    CuSeqlens,
    as_tensor,
    check_cu_seqlens,
    check_max_seqlen,
    check_total,
    document_mask,
    on_host,
)

OP = "wrap_ring_attn_varlen_func"


def _annotation(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> str:
    if q.ndim != 3 or k.ndim != 3:
        return "l h hd^, l h hd^, l h vd^, e^, f^ -> l h vd^, h l"
    h, g = head_dims(OP, q, k)
    if q.shape[0] == k.shape[0]:
        return f"l {h} hd^, l {g} hd^, l {g} vd^, e^, f^ -> l {h} vd^, {h} l"
    # Cross-attention: cutting q and k together would be two identifiers in one split.
    return f"l^ {h} hd^, m^ {g} hd^, m^ {g} vd^, e^, f^ -> l^ {h} vd^, {h} l^"


def _plan(
    comm: Comm,
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool,
    window: tuple[int, int],
    max_seqlens: tuple[int, int],
    spec: str,
) -> Plan:
    """The plan of a call; the totals come from ``cu_seqlens``, so no rank asks another."""
    cu_q, cu_k = on_host(cu_seqlens_q), on_host(cu_seqlens_k)
    for name, values, longest in zip("qk", (cu_q, cu_k), max_seqlens, strict=True):
        check_cu_seqlens(OP, f"cu_seqlens_{name}", values)
        check_max_seqlen(OP, f"max_seqlen_{name}", longest, values)
    if len(cu_q) != len(cu_k):
        raise ArgumentError(
            f"{OP}: cu_seqlens_q has {len(cu_q) - 1} documents and cu_seqlens_k {len(cu_k) - 1}"
        )
    if comm.size == 1:
        check_total(OP, "cu_seqlens_q", cu_q, q.shape[0])
        check_total(OP, "cu_seqlens_k", cu_k, k.shape[0])
    q_layout = layout_of(OP, comm, spec, q.shape[0], int(cu_q[-1]))
    if spec and cu_q[-1] != cu_k[-1]:
        raise ArgumentError(
            f"{OP}: layout={spec} is for q and k alike, but cu_seqlens_q end at {cu_q[-1]} and "
            f"cu_seqlens_k at {cu_k[-1]}; leave it out, and both are split contiguously"
        )
    k_layout = layout_of(OP, comm, spec, k.shape[0], int(cu_k[-1]))
    return make_plan(document_mask(cu_q, cu_k, causal, window), q_layout, k_layout)


def _resolved(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    return_lse: bool,
    kernel: str,
    layout: str,
    group: str,
    *,
    compare: bool,
) -> Call:
    def make(comm: Comm) -> Plan:
        window, longest = (window_left, window_right), (max_seqlen_q, max_seqlen_k)
        return _plan(comm, q, k, cu_seqlens_q, cu_seqlens_k, causal, window, longest, layout)

    options = Options(softmax_scale, kernel, group, lse_used=return_lse)
    return resolve(OP, q, k, v, make, options, compare=compare)


def _backward(dout: Any, dlse: Any, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *inputs, out, lse = rest
    call = _resolved(*inputs, compare=False)
    dout = None if dout is None else dout.unsqueeze(0)
    dlse = None if dlse is None else dlse.unsqueeze(0)
    tensors = (t.unsqueeze(0) for t in (*inputs[:3], out, lse))
    dq, dk, dv = backward(call, dout, dlse, *tensors)
    return dq.squeeze(0), dk.squeeze(0), dv.squeeze(0)


def _fake(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    check_tensors(OP, q, k, v)
    length, h, _d = q.shape
    return q.new_empty((length, h, v.shape[-1])), lse_like(q, (h, length))


def _planned(bound: BoundAnnotation, site: SplitSite, given: Mapping[str, Any]) -> Plan:
    """For costs: the lengths of documents are data, so one document as long as all, the worst."""
    mask = AttnMask.dense(
        site.size,
        causal=given["causal"],
        window=(given["window_left"], given["window_right"]),
    )
    return make_plan(mask, Layout.contiguous(site.size, site.parts))


@register_op(
    _annotation,
    name="seqshard::ring_attn_varlen",
    title=OP,
    rule=sequence_rule(_planned),
    differentiable=("q", "k", "v"),
    fake=_fake,
    backward=_backward,
)
def ring_attn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    return_lse: bool,
    kernel: str,
    layout: str,
    group: str,
) -> tuple[Tensor, Tensor]:
    """The op in a graph; see :func:`wrap_ring_attn_varlen_func`."""
    rest = softmax_scale, causal, window_left, window_right, max_seqlen_q, max_seqlen_k
    names = return_lse, kernel, layout, group
    call = _resolved(q, k, v, cu_seqlens_q, cu_seqlens_k, *rest, *names, compare=True)
    out, lse = forward(call, q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0))
    return out.squeeze(0), lse.squeeze(0)


def wrap_ring_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    deterministic: bool = False,
    return_attn_probs: bool = False,
    enable_ring: bool = True,
    use_cute: bool = False,
    process_group: GroupLike = None,
    return_lse: bool = False,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    layout: Layout | None = None,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """``l (g n) hd^, l g hd^, l g vd^, e^, e^ -> l (g n) vd^``

    Attention inside packed documents whose tokens are cut contiguously across the ranks of a group,
    documents anywhere; with no group, over the tokens given.

        cu_seqlens = [0, 3, 8]    rank 0: a a a b    rank 1: b b b b
        causal                    rank 1 needs one token of rank 0; document a stays at home

    Args:
        q: [l, h, hd], this rank's tokens; any strides.
        k: [l, g, hd], v: [l, g, vd]; h is a multiple of g (grouped queries).
        cu_seqlens_q, cu_seqlens_k: [documents + 1], int32 or int64, of the whole sequence, the same
            on every rank: start at 0, never fall (a document may be empty), end at the total over
            all ranks. Lists and CPU tensors cost no sync; see ``varlen_utils``.
        alibi_slopes: only None for now.
        dropout_p: only 0.0 for now.
        softmax_scale: what scores are multiplied by; None means 1 / sqrt(hd).
        causal: a token attends its document up to itself; aligned at the documents' ends where
            their lengths in q and k differ.
        window_size: (left, right) tokens around it; -1 is unbounded.
        deterministic: accepted either way; forward and backward always are.
        return_attn_probs: only False.
        enable_ring: False computes on this rank alone, whatever ``process_group`` says; not inside
            a captured graph, where an engine would give the op its group again.
        use_cute: only False for now.
        process_group: ranks over which l is cut: a ProcessGroup, its global ranks in increasing
            order, or None. Leave it None under an auto-parallelizer, which fills it in.
        return_lse: also return the log-sum-exp of the scaled scores; gradients flow through it.
        max_seqlen_q, max_seqlen_k: not needed; checked if given.
        layout: which tokens each rank holds; None means ``Layout.contiguous(total, group_size)``.
            Only where q and k have the same total.
        kernel: ``"auto"``, ``"torch"`` or ``"reference"``.
    Returns:
        [l, h, vd] in q's dtype; with ``return_lse`` also [h, l], natural log, fp32 (fp64 for fp64).
        Rows that attend nothing are 0, their lse -inf.

    Communication: as :func:`wrap_ring_attn_func`, and only tokens of documents that cross a cut.

    Raises:
        NotImplementedError: an argument that is not supported yet is set; names it.
        ValueError: shapes, dtypes, heads, cu_seqlens, layout or group do not fit; says what would.

    Gathering k and v of packed sequences: Llama 3 herd of models, arXiv:2407.21783 (2024), 3.3.2.
    """
    if not enable_ring:
        process_group = None

    def check() -> tuple[Any, ...]:
        refuse_unsupported(
            OP,
            alibi_slopes=alibi_slopes,
            dropout_p=dropout_p,
            return_attn_probs=return_attn_probs,
            use_cute=use_cute,
        )
        if not enable_ring and torch.compiler.is_compiling():
            raise NotImplementedError(
                f"{OP}: enable_ring=False is not supported in a captured graph, where an engine "
                "gives the op its group"
            )
        cu_q = as_tensor(OP, "cu_seqlens_q", cu_seqlens_q)
        cu_k = as_tensor(OP, "cu_seqlens_k", cu_seqlens_k)
        if not torch.compiler.is_compiling():
            check_tensors(OP, q, k, v)
            named = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
            ring_attn_varlen.record.bind(named)
        longest = (-1 if n is None else int(n) for n in (max_seqlen_q, max_seqlen_k))
        return (
            cu_q,
            cu_k,
            scale_of(OP, softmax_scale, q),
            causal_of(OP, causal),
            *window_bounds(OP, window_size),
            *longest,
            bool(return_lse),
            kernel,
            spec_of(OP, layout),
        )

    rest = checked(OP, process_group, check)
    out, lse = ring_attn_varlen(q, k, v, *rest, group_name(process_group))
    return (out, lse) if return_lse else out
