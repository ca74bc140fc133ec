"""The graph entry point: an op of ``torch.library``, whose arguments are tensors, numbers, text.

    AttentionCall --encode--> seqshard::ring_attn(q, k, v, ..., layout, group) --decode--> BoundCall

All ops have the same arguments, except those of their mask source: q, k, v, integer tensors
(cu_seqlens, a mask), alibi_slopes, sink, dropout_seed, numbers (causal, window), and the options.

How an op may be split, and the shard's arguments:

    l     the sequence; the op moves what it needs              group, layout
    lq    the sequence of q; k and v are whole on every rank    which rows of q
    qh    the heads of q; k and v are whole on every rank       which heads of q
    h, g  heads, those of k with those of q that they serve     none
    b     the batch                                             none
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torch import Tensor

from annotations import register_op
from annotations.binding import BoundAnnotation
from annotations.rules import Communicates, InnerCost, PartitionRule, SplitSite, Told

from ..core.comm.comm_groups import comm_by_name
from ..core.layout import Layout
from ..core.mask import AttnMask
from .arguments import check_heads, check_tensors
from .bound import bind, lse_like
from .call import AttentionCall, AttentionOp
from .mask_source import Arguments, MaskSource, Problem
from .options import OPTIONAL_TENSORS, REDUCE_DTYPES, OpOptions
from .orders import layout_at, orders_of
from .query_shards import KeyHeads
from .tokens.call_layouts import by_lengths
from .window_source import OneSequence, PackedSequence

ALL_TENSORS = "q", "k", "v", *OPTIONAL_TENSORS  # but for those of the mask source


def declare(
    source: type[MaskSource],
    name: str,
    title: str,
    *,
    assignment: str = "auto",
    split_heads: bool = True,
) -> AttentionOp:
    """Register an attention op; the arguments are :class:`~.call.AttentionOp`'s."""
    op = AttentionOp(name, title, source, assignment, split_heads)

    def attend(**given: Any) -> tuple[Tensor, Tensor]:
        comm, tensors = comm_by_name(given["group"]), [given[name] for name in ALL_TENSORS]
        bound = bind(op, partial(AttentionCall.decode, op, given), tensors[3:], comm, compare=True)
        return bound.forward(comm, tensors)

    def backward(dout: Any, dlse: Any, *args: Any) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = args
        given = dict(zip(op.arguments, inputs, strict=True))
        comm, tensors = comm_by_name(given["group"]), [given[name] for name in ALL_TENSORS]
        bound = bind(op, partial(AttentionCall.decode, op, given), tensors[3:], comm, compare=False)
        return bound.backward(comm, (dout, dlse), (*tensors, out, lse))

    def fake(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        check_tensors(title, q, k, v)
        *lead, length, h, _d = q.shape
        return q.new_empty((*lead, length, h, v.shape[-1])), lse_like(q, (*lead, h, length))

    by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
    attend.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, by_position, annotation=t) for n, t in op.arguments.items()],
        return_annotation=tuple[Tensor, Tensor],
    )
    attend.__name__ = name.split("::")[1]
    attend.__doc__ = f"The op below :func:`{title}`, as it stands in a graph."
    register_op(
        lambda **given: _annotation(op, given),
        name=name,
        title=title,
        rule=_rule(op),
        differentiable=("q", "k", "v", "sink"),
        fake=fake,
        backward=backward,
    )(attend)
    assert op.record is not None  # found now, not while compiling
    return op


def declare_both(name: str, title: str, **how: Any) -> tuple[AttentionOp, AttentionOp]:
    """Register an op over :class:`OneSequence`, and its twin over :class:`PackedSequence`."""
    both = ((OneSequence, name), (PackedSequence, f"{name}_varlen"))
    dense, packed = (declare(source, each, title, **how) for source, each in both)
    return dense, packed


def _annotation(op: AttentionOp, given: Arguments) -> tuple[str, ...]:
    """The annotations of a call, from the shapes it is called with; the preferred one comes first.

    Dropout draws by global token, head and batch entry, which a rank that holds only some of them
    would not know. So with dropout only ``l`` can be split.
    """
    expected = 3 if op.source.packed else 4
    fits = given["q"].ndim == given["k"].ndim == expected
    lq, lk = _tokens(op.source, given) if fits else ("l", "l")
    heads = _heads(op.title, given) if fits else [("h", "h")]
    return tuple(_text(op.source, given, lq, lk, h, g) for h, g in heads)


def _text(source: type[MaskSource], given: Arguments, lq: str, lk: str, h: str, g: str) -> str:
    batch = "b^" if given["dropout_p"] else "b"
    lead = "" if source.packed else f"{batch} "
    inputs = [f"{lead}{lq} {h} hd^", f"{lead}{lk} {g} hd^", f"{lead}{lk} {g} vd^"]
    inputs += source.tensors.values()
    slopes, sink, seed = (given[name] for name in OPTIONAL_TENSORS)
    entries = "1" if source.packed else batch
    inputs.append("?" if slopes is None else h if slopes.ndim == 1 else f"{entries} {h}")
    inputs += ["?" if sink is None else h, "?" if seed is None else "1"]
    while inputs[-1] == "?":  # says nothing at the end, and errors show it
        inputs.pop()
    return f"{', '.join(inputs)} -> {lead}{lq} {h} vd^, {lead}{h} {lq}"


def _tokens(source: type[MaskSource], given: Arguments) -> tuple[str, str]:
    """How the tokens of q and of k are annotated: ``l`` twice, or ``lq`` and ``al^``."""
    cross = not source.same_length and given["q"].shape[-3] != given["k"].shape[-3]
    if not given["row_parts"] and not cross:
        return "l", "l"
    # A shard's arguments replace the call's own, so a part is not cut again.
    laid_out = given["layout"] and not by_lengths(given["layout"])
    taken = given["dropout_p"] or laid_out or given["k_layout"] or given["group"]
    return ("lq^" if taken or given["row_parts"] > 1 else "lq"), "al^"


def _heads(title: str, given: Arguments) -> list[tuple[str, str]]:
    """How heads of q and of k are annotated: ``(g 4)`` and ``g`` with grouped queries, where the
    heads of q alone may be cut too."""
    frozen = "^" if given["dropout_p"] else ""
    h, g = (int(given[name].shape[-2]) for name in "qk")
    if KeyHeads.of_call(title, OpOptions.decode(given), h, g):
        return [("qh^" if frozen or given["head_parts"] > 1 else "qh", "g^")]
    check_heads(title, given["q"], given["k"])
    if h == g:
        return [(f"h{frozen}",) * 2]
    grouped = f"(g{frozen} {h // g})", f"g{frozen}"
    return [grouped] if frozen else [grouped, ("qh", "g^")]


def _sizes(bound: BoundAnnotation) -> tuple[int, int, int, int, int]:
    """batch, heads of q, heads of k, head dim of q, head dim of v."""
    q, k, v = (s for s in bound.input_shapes[:3] if s is not None)
    return (q[0] if len(q) == 4 else 1), q[-2], k[-2], q[-1], v[-1]


def _cost_of_heads(
    bound: BoundAnnotation, site: SplitSite, given: Arguments, itemsize: int
) -> InnerCost:
    return InnerCost(imbalance=-(-site.size // site.parts) * site.parts / site.size)


def _rule(op: AttentionOp) -> PartitionRule:
    """The partition rule of an attention op."""

    def sequence(site: SplitSite) -> dict[str, str]:
        return {"group": site.group, "layout": _contiguous(op.source, site)}

    def rows(site: SplitSite) -> dict[str, int]:
        return {"row_part": site.index, "row_parts": site.parts}

    def heads(site: SplitSite) -> dict[str, int]:
        return {"head_part": site.index, "head_parts": site.parts, "head_total": site.size}

    return PartitionRule(
        communicates={"l": Communicates(sequence, partial(_cost, op))},
        flops=partial(_flops, op),
        told={"lq": Told(rows, partial(_cost_of_rows, op)), "qh": Told(heads, _cost_of_heads)},
        orders=orders_of(op.source),
        repeatable=op.source.lengths,
    )


def _contiguous(source: type[MaskSource], site: SplitSite) -> str:
    """Contiguous shards as text. It is their name alone, so that one graph serves any total, where
    the lengths of documents tell the total, or every rank holds the same number of tokens."""
    known = source.packed or site.size % site.parts == 0
    return "contiguous" if known else Layout.contiguous(site.size, site.parts).spec


def _cost(
    op: AttentionOp, bound: BoundAnnotation, site: SplitSite, given: Arguments, itemsize: int
) -> InnerCost:
    """The cost of the plan that a call split on ``l`` runs."""
    batch, h, g, d, e = _sizes(bound)
    layout, mask = layout_at(site, given), op.source.decode(given).worst(site.size, site.size)
    plan = op.plan(Problem(mask, layout, layout), (h, g), (d, e), batch)
    wire = REDUCE_DTYPES[given["reduce_dtype"]]
    shape = h, g, d, e, itemsize
    backward_bytes = plan.backward_bytes(
        *shape, wire.itemsize if wire else None, lse_gradient=given["return_lse"]
    )
    return InnerCost(
        what="k, v" + (" and q rows" if plan.q_tokens().any() else ""),
        forward_bytes=batch * int(plan.forward_bytes(*shape)[:, 1].max()),
        backward_bytes=batch * int(backward_bytes[:, 1].max()),
        imbalance=plan.imbalance(h, g),
        overlaps=not plan.gathered or plan.head_groups > 1,
    )


def _worst(op: AttentionOp, bound: BoundAnnotation, given: Arguments) -> AttnMask:
    lengths = (shape[-3] for shape in bound.input_shapes[:2] if shape is not None)
    return op.source.decode(given).worst(*lengths)


def _flops(op: AttentionOp, bound: BoundAnnotation, given: Arguments) -> float:
    batch, h, _, d, e = _sizes(bound)
    return 2.0 * batch * h * (d + e) * _worst(op, bound, given).area


def _cost_of_rows(
    op: AttentionOp, bound: BoundAnnotation, site: SplitSite, given: Arguments, itemsize: int
) -> InnerCost:
    mask, each = _worst(op, bound, given), -(-site.size // site.parts)
    starts = range(0, site.size, each)
    largest = max(mask.restrict((n, min(n + each, site.size))).area for n in starts)
    return InnerCost(imbalance=largest * site.parts / mask.area if mask.area else 1.0)
