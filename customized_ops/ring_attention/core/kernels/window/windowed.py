"""Runs a library that knows windows over any pairs: calls it, and puts the results together.

An adapter passes two functions, each one call of its library, and gets a kernel made of them.
Imports go down from the adapter to here, and only these functions are called back. Rows and keys of
a call are views: nothing is gathered. What no earlier call covers is written where it belongs, by
the library itself if it can. Where calls overlap, out and lse are merged and gradients added
(:meth:`.Spans.dtype`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...index_table import IndexTable
from ...merge import merge_
from ...merge.merge import accumulation_dtype
from ...tape import allocate, launch
from ..protocol.kernel import BackwardOperands, ForwardOperands, Grads, OutLse, Pairs
from ..protocol.scoring import Scoring, Tokens
from . import library_calls
from .columns import cut_to, first_columns, inputs_of_same_width, operands_of_same_width, widened
from .library_calls import UNLIMITED, CallLimits, LibraryCall, LibraryCalls
from .spans import Gradient

GradientPlaces = tuple[Tensor | None, ...]
NOWHERE: GradientPlaces = (None, None, None)
LSE_COLUMNS = 8  # added to v for dlse, for libraries that take no dlse: they want multiples of 8


# One call of a library's forward: one window, and one sequence per batch entry or packed ones.
#
#     attend(given: ForwardOperands, call: LibraryCall, scoring, *, into: OutLse | None = None)
#         -> OutLse
#
# q [b, i, h, d], k [b, j, g, d], v [b, j, g, e] -> out [b, i, h, e], lse [b, h, i] fp32; with a
# packing q [i, h, d], k [j, g, d], v [j, g, e] -> out [i, h, e], lse [h, i]. The lse of rows
# without keys may be either infinity. ``into`` is where out and lse belong, views whose last dim is
# dense: a library that can write there returns them, any other ignores them.
Attend = Callable[..., OutLse]

# One call of a library's backward: dq, dk, dv in the inputs' dtype, shaped as they are. lse and
# dlse have any strides. Each of ``into``, where the gradients belong, may be None.
#
#     attend_backward(given: BackwardOperands, call: LibraryCall, scoring, *, deterministic: bool,
#                     into: GradientPlaces = NOWHERE) -> Grads
AttendBackward = Callable[..., Grads]


def forward(
    attend: Attend,
    given: ForwardOperands,
    pairs: Pairs,
    scoring: Scoring,
    limits: CallLimits = UNLIMITED,
) -> OutLse:
    """:meth:`.protocol.Kernel.forward` through ``attend``."""
    todo = LibraryCalls.of(pairs, given, limits)
    if todo.rows.whole and todo.calls[0].takes_all:
        return attend(given, todo.calls[0], scoring, into=None)
    if todo.rows.whole:
        return _attend(attend, todo.calls[0], given, scoring)
    q, v = given.q, given.v
    b, rows, h, _ = q.shape
    dtype, wide = todo.rows.dtype(q.dtype), accumulation_dtype(q.dtype)
    out = allocate(q.new_empty, (b, rows, h, v.shape[-1]), dtype=dtype)
    lse = allocate(q.new_empty, (b, h, rows), dtype=wide)
    for start, stop in todo.rows.outside:
        launch(Tensor.zero_, out.narrow(1, start, stop - start))
        launch(Tensor.fill_, lse.narrow(2, start, stop - start), -torch.inf)
    for call in todo.calls:
        place = call.cut_rows(out), call.cut_stats(lse)
        if not todo.rows.fresh[call.number]:
            merge_(*place, *_attend(attend, call, given, scoring))
        elif dtype == q.dtype and call.stats_are_views:
            _attend(attend, call, given, scoring, place)
        else:
            for whole, part in zip(place, _attend(attend, call, given, scoring), strict=True):
                launch(Tensor.copy_, whole, part)
    return out, lse


def _attend(
    attend: Attend,
    call: LibraryCall,
    given: ForwardOperands,
    scoring: Scoring,
    place: OutLse | None = None,
) -> OutLse:
    """out and lse of one call's rows; in their ``place`` if there is one."""
    into = None if place is None else (call.pack(place[0]), call.pack_stats(place[1]))
    inputs = given if call.takes_all else call.inputs(given)
    out, lse = attend(inputs, call, scoring, into=into)
    if call.skips_rows:  # some libraries write +inf there
        launch(_negate_inf, lse)
    if into is not None and out is not into[0]:
        launch(Tensor.copy_, into[0], out)
        launch(Tensor.copy_, into[1], lse)
    return place or (call.unpack(out), call.unpack_stats(lse))


def _negate_inf(lse: Tensor) -> None:
    lse.masked_fill_(lse == torch.inf, -torch.inf)


def backward(
    attend_backward: AttendBackward,
    given: BackwardOperands,
    pairs: Pairs,
    scoring: Scoring,
    limits: CallLimits = UNLIMITED,
    *,
    deterministic: bool = False,
) -> Grads:
    """:meth:`.protocol.Kernel.backward` through ``attend_backward``."""
    todo = LibraryCalls.of(pairs, given[:5], limits)
    if todo.rows.whole and todo.keys.whole and todo.calls[0].takes_all:
        return attend_backward(given, todo.calls[0], scoring, deterministic=deterministic)
    dq = Gradient(given.q, todo.rows)
    dk, dv = Gradient(given.k, todo.keys), Gradient(given.v, todo.keys)
    for call in todo.calls:
        places = call.cut_rows(dq.total), call.cut_keys(dk.total), call.cut_keys(dv.total)
        into = tuple(
            call.pack(place) if gradient.takes(call.number) else None
            for gradient, place in zip((dq, dk, dv), places, strict=True)
        )
        parts = attend_backward(
            call.operands(given), call, scoring, deterministic=deterministic, into=into
        )
        for gradient, place, written, part in zip((dq, dk, dv), places, into, parts, strict=True):
            if part is not written:
                gradient.add(call.number, call.unpack(part), place)
    return dq.total, dk.total, dv.total


def kernel_of(
    attend: Attend,
    attend_backward: AttendBackward,
    limits: CallLimits = UNLIMITED,
    *,
    same_widths: bool = False,
) -> tuple[Callable[..., OutLse], Callable[..., Grads], Callable[[Pairs], list[IndexTable]]]:
    """``forward``, ``backward`` and ``tables`` of :class:`.protocol.Kernel` through two calls of a
    library.

    Args:
        same_widths: for a library that wants q, k and v equally wide and takes no dlse. Its
            ``Capabilities`` say ``lse_columns=LSE_COLUMNS``.
    """

    def kernel_forward(
        given: ForwardOperands, pairs: Pairs, scoring: Scoring, tokens: Tokens | None
    ) -> OutLse:
        inputs = inputs_of_same_width(given) if same_widths else given
        out, lse = forward(attend, inputs, pairs, scoring, limits)
        return first_columns(out, given.v.shape[-1]), lse

    def kernel_backward(
        given: BackwardOperands,
        pairs: Pairs,
        scoring: Scoring,
        tokens: Tokens | None,
        *,
        deterministic: bool = False,
    ) -> Grads:
        operands = given
        if same_widths:
            operands = operands_of_same_width(widened(given, LSE_COLUMNS))
        grads = backward(
            attend_backward, operands, pairs, scoring, limits, deterministic=deterministic
        )
        return cut_to(grads, given)

    return kernel_forward, kernel_backward, partial(library_calls.tables, limits=limits)
