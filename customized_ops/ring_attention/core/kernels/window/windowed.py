"""Runs a kernel that knows windows over any pairs: call (``steps``), and put the parts together.

Rows and keys of a call are views: nothing is gathered. What no other call has is written where it
belongs, by the library itself if it can. Where calls overlap, out and lse are merged and gradients
added: in their own dtype where no token has more than two parts, else in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ...merge import merge_
from ...merge.merge import accumulation_dtype
from ..pairs import Pairs
from ..scoring import Scoring, Tokens
from .library_calls import LibraryCall, Packing, steps
from .lowering import Window
from .spans import Gradient


class Attend(Protocol):
    """One call of a library's forward: one window, one sequence a batch entry or packed ones.

    q [b, i, h, d], k [b, j, g, d], v [b, j, g, e] -> out [b, i, h, e], lse [b, h, i] fp32; with a
    packing q [i, h, d], k [j, g, d], v [j, g, e] -> out [i, h, e], lse [h, i]. The lse of rows
    without keys may be either infinity.

    Args:
        into: where out and lse belong, views whose last dim is dense. They are returned if they
            were written; who cannot do that leaves them alone.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: Window,
        packing: Packing | None,
        scoring: Scoring,
        *,
        into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]: ...


class AttendBackward(Protocol):
    """One call of a library's backward: dq, dk, dv in the inputs' dtype, shaped as they are. lse
    and dlse have any strides.

    Args:
        into: where dq, dk and dv belong, as of :class:`Attend`; each may be None.
    """

    def __call__(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        window: Window,
        packing: Packing | None,
        scoring: Scoring,
        *,
        dlse: Tensor | None,
        deterministic: bool,
        into: tuple[Tensor | None, ...] = (None, None, None),
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def forward(
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pairs: Pairs,
    scoring: Scoring,
    *,
    gaps: bool = True,
    wide_right: bool = True,
) -> tuple[Tensor, Tensor]:
    """:meth:`.protocol.Kernel.forward` through ``attend``.

    Args:
        gaps, wide_right: see :func:`.lowering.lower`.
    """
    todo = steps(pairs, (q, k, v), gaps, wide_right)
    if todo.rows.whole:
        return _attend(attend, todo.steps[0], q, k, v, scoring)
    b, rows, h, _ = q.shape
    dtype, wide = todo.rows.dtype(q.dtype), accumulation_dtype(q.dtype)
    out = q.new_empty((b, rows, h, v.shape[-1]), dtype=dtype)
    lse = q.new_empty((b, h, rows), dtype=wide)
    for start, stop in todo.rows.outside:
        out.narrow(1, start, stop - start).zero_()
        lse.narrow(2, start, stop - start).fill_(-torch.inf)
    for step in todo.steps:
        place = step.cut_rows(out), step.cut_stats(lse)
        if not todo.rows.fresh[step.call]:
            merge_(*place, *_attend(attend, step, q, k, v, scoring))
        elif dtype == q.dtype and step.stats_are_views:
            _attend(attend, step, q, k, v, scoring, place)
        else:
            for mine, part in zip(place, _attend(attend, step, q, k, v, scoring), strict=True):
                mine.copy_(part)
    return out, lse


def _attend(
    attend: Attend,
    step: LibraryCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scoring: Scoring,
    place: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse of one call's rows; in their ``place`` if there is one."""
    into = None if place is None else (step.pack(place[0]), step.pack_stats(place[1]))
    if not step.plain:
        q, k, v = step.cut_rows(q), step.cut_keys(k), step.cut_keys(v)
        q, k, v = step.pack(q), step.pack(k), step.pack(v)
    out, lse = attend(q, k, v, step.window, step.packing, scoring, into=into)
    if step.skips_rows:  # some libraries write +inf there
        lse.masked_fill_(lse == torch.inf, -torch.inf)
    if into is not None and out is not into[0]:
        into[0].copy_(out)
        into[1].copy_(lse)
    return place or (step.unpack(out), step.unpack_stats(lse))


def backward(
    attend_backward: AttendBackward,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pairs: Pairs,
    scoring: Scoring,
    *,
    dlse: Tensor | None = None,
    deterministic: bool = False,
    gaps: bool = True,
    wide_right: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """:meth:`.protocol.Kernel.backward` through ``attend_backward``.

    Args:
        gaps, wide_right: see :func:`.lowering.lower`.
    """
    todo = steps(pairs, (dout, q, k, v, out), gaps, wide_right)
    if todo.rows.whole and todo.keys.whole and todo.steps[0].plain:
        given = dout, q, k, v, out, lse, todo.steps[0].window, None, scoring
        return attend_backward(*given, dlse=dlse, deterministic=deterministic)
    dq, dk, dv = Gradient(q, todo.rows), Gradient(k, todo.keys), Gradient(v, todo.keys)
    for step in todo.steps:
        rows, keys, pack = step.cut_rows, step.cut_keys, step.pack
        gradients = (dq, rows), (dk, keys), (dv, keys)
        into = tuple(
            pack(cut(gradient.total)) if gradient.takes(step.call) else None
            for gradient, cut in gradients
        )
        parts = attend_backward(
            pack(rows(dout)),
            pack(rows(q)),
            pack(keys(k)),
            pack(keys(v)),
            pack(rows(out)),
            step.pack_stats(step.cut_stats(lse)),
            step.window,
            step.packing,
            scoring,
            dlse=None if dlse is None else step.pack_stats(step.cut_stats(dlse)),
            deterministic=deterministic,
            into=into,
        )
        for (gradient, cut), part, written in zip(gradients, parts, into, strict=True):
            if part is not written:
                gradient.add(step.call, step.unpack(part), cut(gradient.total))
    return dq.total, dk.total, dv.total


def kernel_of(
    attend: Attend, attend_backward: AttendBackward, *, gaps: bool = True, wide_right: bool = True
) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., tuple[Tensor, Tensor, Tensor]]]:
    """:meth:`.protocol.Kernel.forward` and ``backward`` through two calls of a library.

    Args:
        gaps, wide_right: see :func:`.lowering.lower`.
    """

    def kernel_forward(
        q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, scoring: Scoring, tokens: Tokens | None
    ) -> tuple[Tensor, Tensor]:
        """See :class:`~.protocol.Kernel`."""
        return forward(attend, q, k, v, pairs, scoring, gaps=gaps, wide_right=wide_right)

    def kernel_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        pairs: Pairs,
        scoring: Scoring,
        tokens: Tokens | None,
        *,
        dlse: Tensor | None = None,
        deterministic: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`~.protocol.Kernel`."""
        return backward(
            attend_backward,
            dout,
            q,
            k,
            v,
            out,
            lse,
            pairs,
            scoring,
            dlse=dlse,
            deterministic=deterministic,
            gaps=gaps,
            wide_right=wide_right,
        )

    return kernel_forward, kernel_backward
