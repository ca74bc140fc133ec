"""A custom op along the sequence: RWKV's token shift, over ranks, layouts and documents.

A token sees itself and the one before it in its document, which may be on another rank. The page
"Adding ops along a sequence" explains the steps; here they are in order, with all imports. The
function works in ``parallelize`` like those of the package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from annotations import InnerCost, register_op
from annotations.library.define import autograd_on
from customized_ops.along_sequence import (
    Segments,
    call_segments,
    check_tensors,
    checked,
    checked_documents,
    checked_segments,
    facts_of,
    segments_when_cut,
    sequence_rule,
    wanted_exchange,
)
from customized_ops.ring_attention import Layout
from customized_ops.ring_attention.core.comm.comm_groups import comm_by_name, group_name
from customized_ops.ring_attention.core.comm.transfer_side import Dims, add

TITLE = "token_shift"
TOKENS = Dims(tokens=1, heads=2)  # which dim of [b, l, d] has tokens; heads are not split here

# 1. and 2. What ranks lack: the token before each segment that does not begin its document.


def lacking(segments: Segments) -> np.ndarray:
    """int64[n, 4], by rank: rank, start and stop of the tokens, index among those it receives."""
    later = np.flatnonzero(~segments.first)
    rank, stop = segments.rank[later], segments.start[later]
    order = np.lexsort((stop, rank))
    rank, stop = rank[order], stop[order]
    return np.stack([rank, stop - 1, stop, np.arange(len(rank)) - np.searchsorted(rank, rank)], 1)


def before(segments: Segments, wanted: np.ndarray, rank: int) -> Tensor:
    """int64[l]: index of the token before each one, among own tokens, received ones and a zero."""
    local, mine = segments.local(rank), wanted[wanted[:, 0] == rank]
    length = segments.layout.sizes[rank]
    own = np.arange(length) if local.order is None else local.order.values
    found = np.append([0], own[:-1])  # in the order of the sequence
    received = {stop: length + place for _, _, stop, place in mine.tolist()}
    for n, start in enumerate(segments.start[local.number].tolist()):
        found[local.ends[n]] = received.get(start, length + len(mine))
    index = np.empty(length, np.int64)
    index[own] = found[:length]
    return torch.from_numpy(index)


def shifted(x: Tensor, received: Tensor, mix: Tensor, index: Tensor) -> Tensor:
    """The arithmetic on one device; a kernel would go here."""
    every = torch.cat([x, received, x.new_zeros(len(x), 1, x.shape[2])], 1)
    return x + mix * (every.index_select(1, index.to(x.device)) - x)


# 3. The op, on one rank's part of the tokens.


def _annotation(cu_seqlens: Tensor | None, **_: Any) -> str:
    batch, lengths = ("b", "?") if cu_seqlens is None else ("1", "e^")
    return f"{batch} l d, d, {lengths} -> {batch} l d"


def _cost(bound: Any, site: Any, given: Mapping[str, Any], itemsize: int) -> InnerCost:
    (b, _, d), wanted = given["x"].shape, lacking(segments_when_cut(site, given))
    most = int(np.bincount(wanted[:, 0], minlength=1).max()) * b * d * itemsize
    return InnerCost("tokens before", most, 2 * most)  # the backward fetches them again


def _backward(dy: Any, x: Tensor, mix: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *where, _y = rest
    comm = comm_by_name(where[-1])
    with comm.doing(f"{TITLE}, backward"):
        exchange, received, index = _received(x, *where)
        leaves = [t.detach().requires_grad_() for t in (x, received, mix)]
        with autograd_on():
            y = shifted(*leaves, index)
            dx, home, dmix = torch.autograd.grad(y, leaves, dy, materialize_grads=True)
        if exchange is not None:  # gradients of tokens go to the ranks that hold them
            comm.send_home(exchange, [home], [dx], [TOKENS], add).wait()
    return dx, dmix


@register_op(
    _annotation,
    name="example::token_shift",
    title=TITLE,
    rule=sequence_rule(_cost, None, ("cu_seqlens",)),
    differentiable=("x", "mix"),
    backward=_backward,
)
def shift_op(x: Tensor, mix: Tensor, cu_seqlens: Tensor | None, layout: str, group: str) -> Tensor:
    """The op as it appears in a graph."""
    with comm_by_name(group).doing(f"{TITLE}, forward"):  # peers hear of an error inside
        _, received, index = _received(x, cu_seqlens, layout, group)
        return shifted(x, received, mix, index)


def _received(x: Tensor, cu_seqlens: Tensor | None, layout: str, group: str) -> Any:
    comm = comm_by_name(group)
    segments = call_segments(TITLE, x.shape[1], cu_seqlens, layout, comm)
    wanted = lacking(segments)
    index = before(segments, wanted, comm.rank)
    if not len(wanted):  # on every rank alike
        return None, x[:, :0], index
    exchange = wanted_exchange(wanted, segments.layout, comm.rank)
    return exchange, comm.fetch(exchange, [x], [TOKENS]).wait()[0], index


# 5. The function that users call.


def token_shift(
    x: Tensor,
    mix: Tensor,
    cu_seqlens: Sequence[int] | None = None,
    process_group: Any = None,
    *,
    layout: Layout | None = None,
) -> Tensor:
    """x: [b, l, d], this rank's tokens; mix: [d] -> x + mix * (the token before - x)."""

    def check() -> Any:
        check_tensors(TITLE, {"x": x, "mix": mix})
        lengths = checked_documents(TITLE, x, cu_seqlens, process_group)
        if not torch.compiler.is_compiling():
            shift_op.record.bind({"x": x, "mix": mix, "cu_seqlens": lengths})
        return lengths, *checked_segments(TITLE, x.shape[1], lengths, layout, process_group)

    facts = lambda found: facts_of(found[2], {"x": x})  # noqa: E731 - what ranks compare
    lengths, spec, _ = checked(TITLE, process_group, check, facts)
    return shift_op(x, mix, lengths, spec, group_name(process_group))
