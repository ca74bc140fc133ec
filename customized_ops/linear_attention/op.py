"""The ops in a graph: their annotations, their partition rule, their forward and backward.

    split on    what moves inside                                 gradients of whole inputs
    b, heads    nothing                                           none is whole
    l           maps of states, along documents that are cut      initial states: parts to add up

Each function is two ops: one without initial and final states, which takes any number of documents,
and one with them. Both also return what the backward needs from other ranks and from the kernel.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from annotations import register_op
from annotations.binding import BoundAnnotation
from annotations.registry import AnnotatedOp
from annotations.rules import InnerCost, SplitSite

from ..along_sequence.arguments import call_segments
from ..along_sequence.rule import segments_when_cut, sequence_rule
from ..along_sequence.segments import LocalSegments, entries_of
from ..ring_attention.core.arrays import Ints
from ..ring_attention.core.comm import Comm
from ..ring_attention.core.comm.comm_groups import comm_by_name
from ..ring_attention.core.index_table import IndexTable
from ..ring_attention.core.layout import Layout
from ..ring_attention.core.plan.cost_model import H200
from ..ring_attention.op.arguments import ArgumentError
from ..ring_attention.op.tokens.call_layouts import by_lengths
from . import passes
from .chains import scan_of
from .kernels import CHOICE, KERNELS, Operands
from .rank_call import RankCall, map_bytes

Given = Mapping[str, Any]  # the op's arguments by name
OPERANDS = ("q", "k", "v", "g", "beta")
CHUNK = 64  # tokens in a chunk of the kernels whose work is estimated


def declare(name: str, title: str, *, states: bool) -> AnnotatedOp:
    """Register an op, with or without initial and final states."""
    optional = {"initial_state": Tensor | None} if states else {}
    own = {"output_final_state": bool} if states else {}
    arguments: dict[str, Any] = {
        **dict.fromkeys(("q", "k", "v", "g"), Tensor),
        **{"beta": Tensor | None, **optional, "cu_seqlens": Tensor | None, **own},
        **{"scale": float, "kernel": str, "layout": str, "group": str},
    }
    results = tuple[Tensor, Tensor, Tensor, Tensor] if states else tuple[Tensor, Tensor, Tensor]

    def run(**given: Any) -> tuple[Tensor, ...]:
        comm = comm_by_name(given["group"])
        with comm.doing(f"{title}, forward"):
            return _forward(_rank_call(title, given, comm), given, states)

    def backward(*args: Any) -> tuple[Tensor | None, ...]:
        grads, inputs = args[: 3 + states], args[3 + states : -3 - states]
        dfinal, saved = grads[1] if states else None, passes.Saved(*args[-2:])
        given = dict(zip(arguments, inputs, strict=True))
        comm = comm_by_name(given["group"])
        with comm.doing(f"{title}, backward"):
            call = _rank_call(title, given, comm)
            return _backward(call, given, states, grads[0], dfinal, saved)

    by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, by_position, annotation=t) for n, t in arguments.items()],
        return_annotation=results,
    )
    run.__name__, run.__doc__ = name.split("::")[1], f"The op below :func:`{title}`, in a graph."
    return register_op(
        lambda **given: _annotation(title, given, states),
        name=name,
        title=title,
        rule=sequence_rule(_cost, _flops, () if states else ("cu_seqlens",), saves_states=True),
        differentiable=(*OPERANDS, *optional),
        fake=lambda **given: _fake(title, given, states),
        backward=backward,
    )(run)


def _annotation(title: str, given: Given, states: bool) -> str:
    q, v, lengths = given["q"], given["v"], given["cu_seqlens"]
    b = "b" if lengths is None else "1"
    documents = "b" if lengths is None else str(int(lengths.shape[0]) - 1)
    h, hv = (int(x.shape[2]) if x.ndim == 4 else 1 for x in (q, v))
    if h == 0 or hv % h:
        raise ArgumentError(
            f"{title}: v has {hv} heads and q has {h} (dim 2 of {tuple(v.shape)} and "
            f"{tuple(q.shape)}); the heads of v must be a multiple of those of q and k"
        )
    few, many = ("h", "h") if h == hv else ("g", f"(g {hv // h})")
    state = f"{documents} {many} dk^ dv^"
    inputs = [f"{b} l {few} dk^"] * 2 + [f"{b} l {many} dv^", f"{b} l {many}"]
    inputs[3] += " dk^" if given["g"].ndim == 4 else ""
    inputs.append("?" if given["beta"] is None else f"{b} l {many}")
    results = [f"{b} l {many} dv^"]
    if states:
        inputs.append("?" if given["initial_state"] is None else state)
        results.append(state if given["output_final_state"] else "?")
    inputs.append("?" if lengths is None else "e^")
    return f"{', '.join(inputs)} -> {', '.join([*results, '?', '?'])}"


def _fake(title: str, given: Given, states: bool) -> tuple[Tensor, ...]:
    q, v, spec, comm = given["q"], given["v"], given["layout"], comm_by_name(given["group"])
    if ":" in spec and not by_lengths(spec):
        entries = entries_of(Layout.parse(spec), comm.rank)
    else:  # contiguous, or by unknown lengths: as one document cut in zigzag order
        held = comm.rank > 0 and q.shape[1] > 0
        entries = int(held) + int(comm.size > 1 and by_lengths(spec))
    x = _operands(given, given, np.zeros(1, np.int64))
    name = given["kernel"]
    kernel = KERNELS.get(name) or CHOICE.choose(title, name, x, q)  # it runs elsewhere
    of_states = x.empty_states(entries, x.matrix_width)
    saved = of_states, v.new_empty((*v.shape[:3], kernel.kept_width(x)))
    if not states:
        return v.new_empty(v.shape), *saved
    return v.new_empty(v.shape), v.new_empty(_final_shape(given), dtype=x.state_dtype), *saved


def _final_shape(given: Given) -> tuple[int, ...]:
    if not given["output_final_state"]:
        return (0,)
    (b, _, hv, dv), lengths = given["v"].shape, given["cu_seqlens"]
    documents = b if lengths is None else lengths.shape[0] - 1
    return documents, hv, given["q"].shape[-1], dv


def _rank_call(title: str, given: Given, comm: Comm) -> RankCall:
    q, lengths = given["q"], given["cu_seqlens"]
    segments = call_segments(title, q.shape[1], lengths, given["layout"], comm)
    local = segments.local(comm.rank)
    tensors = {n: None if (t := given[n]) is None else in_order(t, local) for n in OPERANDS}
    x = _operands(tensors, given, local.ends)
    return RankCall(x, segments, comm, CHOICE.choose(title, given["kernel"], x, x.q))


def _operands(tensors: Given, given: Given, ends: Ints) -> Operands:
    return Operands(**{n: tensors[n] for n in OPERANDS}, ends=ends, scale=given["scale"])


def in_order(x: Tensor, local: LocalSegments) -> Tensor:
    """Tokens reordered from the layout's order to that of the sequence."""
    return x if local.order is None else x.index_select(1, local.order.on(x.device))


def in_layout(x: Tensor, local: LocalSegments) -> Tensor:
    """The inverse of :func:`in_order`."""
    return x if local.back is None else x.index_select(1, local.back.on(x.device))


def _forward(call: RankCall, given: Given, states: bool) -> tuple[Tensor, ...]:
    out, final, saved = passes.forward(call, _initial(call, given) if states else None)
    out = in_layout(out, call.local).contiguous()
    if not states:
        return out, *saved
    if not given["output_final_state"]:
        return out, final.new_empty(0), *saved
    by_document = _moved(final, call.local.ended, final.new_zeros(_by_document(call)))
    if given["initial_state"] is not None and call.comm.rank == 0:
        empty = call.segments.without_tokens
        _moved(_documents(given["initial_state"], given), (empty, empty), by_document)
    if call.comm.size > 1:
        call.comm.all_reduce(by_document, "sum")
    return out, by_document.reshape(_final_shape(given)), *saved


def _backward(
    call: RankCall,
    given: Given,
    states: bool,
    dout: Tensor | None,
    dfinal: Tensor | None,
    saved: passes.Saved,
) -> tuple[Tensor | None, ...]:
    local, x, of_segments, of_documents = call.local, call.x, None, None
    if states and given["output_final_state"]:
        of_documents = x.empty_states(0).new_zeros(_by_document(call))
        if dfinal is not None:
            of_documents += _documents(dfinal, given)
        if call.comm.size > 1:  # each rank may use its copy in its own way
            call.comm.all_reduce(of_documents, "sum")
        of_segments = _moved(of_documents, local.ended[::-1], x.empty_states(len(local)))
    dout = torch.zeros_like(given["v"]) if dout is None else dout
    initial = _initial(call, given) if states else None
    found = passes.backward(call, initial, saved, in_order(dout, local), of_segments)
    grads = [
        None if grad is None else in_layout(grad, local).to(given[name].dtype)
        for name, grad in zip(OPERANDS, found, strict=False)
    ]
    if states and given["initial_state"] is not None:
        assert found.initial is not None
        of_initial = found.initial.new_zeros(_by_document(call))
        _moved(found.initial, local.begun, of_initial)
        if of_documents is not None and call.comm.rank == 0:
            empty = call.segments.without_tokens
            _moved(of_documents, (empty, empty), of_initial)
        initial_state = given["initial_state"]
        grads.append(of_initial.reshape(initial_state.shape).to(initial_state.dtype))
    elif states:
        grads.append(None)
    return tuple(grads)


def _by_document(call: RankCall) -> tuple[int, ...]:
    """The shape [documents, b, hv, dk, dv]; one of the first two is 1."""
    b, _, hv, dv = call.x.v.shape
    return len(call.segments.ends) - 1, b, hv, call.x.q.shape[-1], dv


def _documents(states: Tensor, given: Given) -> Tensor:
    """States in the users' shape, [b or documents, hv, dk, dv], as in :func:`_by_document`."""
    return states.unsqueeze(0 if given["cu_seqlens"] is None else 1)


def _initial(call: RankCall, given: Given) -> Tensor | None:
    """The states that enter the rank's segments, except those that come from other ranks."""
    if given["initial_state"] is None:
        return None
    states = _documents(given["initial_state"], given)
    return _moved(states, call.local.begun[::-1], call.x.empty_states(len(call.local)))


def _moved(source: Tensor, rows: Sequence[IndexTable], into: Tensor) -> Tensor:
    """Copy rows of ``source`` (first table) to rows of ``into`` (second table); returns it."""
    from_rows, to_rows = (table.on(into.device) for table in rows)
    return into.index_copy_(0, to_rows, source.index_select(0, from_rows).to(into.dtype))


def _sizes(given: Given) -> tuple[int, int, int, int]:
    """b, hv, dk, dv."""
    b, _, hv, dv = given["v"].shape
    return b, hv, given["q"].shape[-1], dv


def _work(given: Given) -> tuple[float, float, float]:
    """Forward operations per token: all of them, those for states, and those for a segment's A."""
    b, hv, dk, dv = _sizes(given)
    delta = given["beta"] is not None
    state = (4 if delta else 2) * dk * dv + (CHUNK * (dk + dv) if delta else 0)
    out = 2 * dk * dv + 2 * CHUNK * (dk + dv)
    return b * hv * (state + out), b * hv * state, b * hv * 4 * dk * dk if delta else 0


def _flops(bound: BoundAnnotation, given: Given) -> float:
    return _work(given)[0] * bound.sizes["l"]


def _cost(bound: BoundAnnotation, site: SplitSite, given: Given, itemsize: int) -> InnerCost:
    """The cost of the scans that a call split on ``l`` runs. What ranks compute twice (the states
    of segments between others) is charged as uneven work, and so is waiting for states."""
    segments = segments_when_cut(site, given)
    of_map = map_bytes(given["beta"] is not None, given["g"].ndim == 4, *_sizes(given))
    scans = [scan_of(segments, of_map, H200, backward) for backward in (False, True)]
    there, back = (int(s.received_bytes(of_map).sum(0).max()) if s else 0 for s in scans)
    rounds = max(len(s.rounds) if s else 1 for s in scans)
    whole, state, matrix = _work(given)
    tokens = segments.stop - segments.start
    maps = scans[0] is not None and not scans[0].in_turn
    twice = np.where(segments.first | segments.last, 0, maps * (state + matrix))
    work = np.bincount(segments.rank, tokens * (whole + twice), minlength=site.parts)
    longest = max(float(work.max(initial=0)), state * max(s.tokens if s else 0 for s in scans))
    imbalance = longest * site.parts / max(whole * site.size, 1)
    summed = _summed_bytes(given, site.parts)
    there, back = there + summed, back + summed
    return InnerCost("maps of states", there, back, max(imbalance, 1.0), rounds=rounds)


def _summed_bytes(given: Given, parts: int) -> int:
    """Bytes that a rank receives when final states, or their gradients, are added up in fp32."""
    if not given.get("output_final_state"):
        return 0
    return 2 * 4 * math.prod(_final_shape(given)) * (parts - 1) // parts


GATED_DELTA_RULE, GATED_LINEAR_ATTN = (
    {
        states: declare(
            f"seqshard::{name}{'_states' if states else ''}", f"wrap_{name}_func", states=states
        )
        for states in (False, True)
    }
    for name in ("gated_delta_rule", "gated_linear_attn")
)
