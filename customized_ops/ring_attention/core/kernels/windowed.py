"""Runs a kernel that knows windows over any pairs: lower, call, and put the parts together.

Rows and keys of a call are views: nothing is gathered. Several segments go packed. Where the calls'
rows do not overlap, out and lse are only placed, elsewhere merged; so are the gradients, in their
own dtype where parts do not overlap and summed in fp32 elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..merge import accumulation_dtype, merge_
from .lowering import Call, Range, Window, lower
from .pairs import Pairs
from .scoring import Scoring, Tokens


@dataclass(frozen=True, eq=False)
class Packing:
    """Sequences laid end to end, the n-th rows with the n-th keys. Either may be empty: rows
    without keys give out 0, and keys without rows take gradient 0.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: int32[n + 1], on the device of q.
        max_seqlen_q, max_seqlen_k: no less than the tokens of the longest.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


class Attend(Protocol):
    """One call of a library's forward: one window, one sequence a batch entry or packed ones.

    q [b, i, h, d], k [b, j, g, d], v [b, j, g, e] -> out [b, i, h, e], lse [b, h, i] fp32; with a
    packing q [i, h, d], k [j, g, d], v [j, g, e] -> out [i, h, e], lse [h, i]. The lse of rows
    without keys may be either infinity.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: Window,
        packing: Packing | None,
        scoring: Scoring,
    ) -> tuple[Tensor, Tensor]: ...


class AttendBackward(Protocol):
    """One call of a library's backward: dq, dk, dv in the inputs' dtype, shaped as they are. lse
    and dlse are contiguous."""

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
    ) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True)
class Spans:
    """Where the calls' rows, or their keys, lie in the whole.

    Attributes:
        whole: whether there is one call, and it has everything.
        apart: whether no two overlap.
        outside: what is in none.
    """

    whole: bool
    apart: bool
    outside: tuple[Range, ...]

    @classmethod
    def of(cls, ranges: list[Range], length: int) -> Spans:
        """Those of ``ranges`` in [0, length)."""
        order = sorted(ranges)
        apart = all(stop <= after for (_, stop), (after, _) in pairwise(order))
        outside, done = [], 0
        for start, stop in [*order, (length, length)]:
            if start > done:
                outside.append((done, start))
            done = max(done, stop)
        return cls(ranges == [(0, length)], apart, tuple(outside))


@dataclass(frozen=True)
class Lowered:
    """The calls of some pairs, and where they lie."""

    calls: tuple[Call, ...]
    rows: Spans
    keys: Spans


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
    lowered = lowered_of(pairs, gaps, wide_right)
    if lowered.rows.whole:
        return _attend(attend, q, k, v, lowered.calls[0], pairs, scoring)
    wide = accumulation_dtype(q.dtype)
    b, rows, h, _ = q.shape
    out = q.new_empty((b, rows, h, v.shape[-1]), dtype=q.dtype if lowered.rows.apart else wide)
    lse = q.new_empty((b, h, rows), dtype=wide)
    # Where calls overlap, the later ones are merged into rows that the first does not write.
    written = lowered.rows if lowered.rows.apart else Spans.of([lowered.calls[0].rows], rows)
    for start, stop in written.outside:
        out[:, start:stop] = 0
        lse[..., start:stop] = -torch.inf
    for n, call in enumerate(lowered.calls):
        here = slice(*call.rows)
        part, part_lse = _attend(attend, q, k, v, call, pairs, scoring)
        if n == 0 or lowered.rows.apart:
            out[:, here], lse[..., here] = part, part_lse
        else:
            merge_(out[:, here], lse[..., here], part, part_lse)
    return out, lse


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
    lowered = lowered_of(pairs, gaps, wide_right)
    dq = Gradient(q, lowered.rows)
    dk, dv = Gradient(k, lowered.keys), Gradient(v, lowered.keys)
    for call in lowered.calls:
        rows, keys = slice(*call.rows), slice(*call.keys)
        hull = [t[:, rows] for t in (dout, q, out)] + [t[:, keys] for t in (k, v)]
        stats = [lse[..., rows]] + ([] if dlse is None else [dlse[..., rows]])
        parts = []
        for entries, packing in _batches(call, pairs, hull):
            dout_, q_, out_, k_, v_ = (_pack(t[entries], packing) for t in hull)
            lse_, *dlse_ = (_pack_stats(t[entries], packing) for t in stats)
            part = attend_backward(
                dout_,
                q_,
                k_,
                v_,
                out_,
                lse_,
                call.window,
                packing,
                scoring,
                dlse=dlse_[0] if dlse_ else None,
                deterministic=deterministic,
            )
            parts.append([_unpack(t, packing, entries) for t in part])
        part_q, part_k, part_v = map(_together, zip(*parts, strict=True))
        dq.add(part_q, rows)
        dk.add(part_k, keys)
        dv.add(part_v, keys)
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


class Gradient:
    """The gradient of one tensor from those of the calls' parts of it.

    Attributes:
        total: [b, l, h, d], in the dtype of ``like`` or, where parts overlap, of accumulation.
    """

    def __init__(self, like: Tensor, spans: Spans) -> None:
        self._spans = spans
        if spans.whole:
            self.total = like.new_empty(0)  # the one part takes its place
        elif spans.apart:
            self.total = like.new_empty(like.shape)
            for start, stop in spans.outside:
                self.total[:, start:stop] = 0
        else:
            self.total = like.new_zeros(like.shape, dtype=accumulation_dtype(like.dtype))

    def add(self, part: Tensor, here: slice) -> None:
        """Add the gradient of the tokens ``here``; takes ownership of it."""
        if self._spans.whole:
            self.total = part
        elif self._spans.apart:
            self.total[:, here] = part
        else:
            self.total[:, here] += part


def lowered_of(pairs: Pairs, gaps: bool = True, wide_right: bool = True) -> Lowered:
    """The calls of ``pairs``, worked out once."""

    def make() -> Lowered:
        calls = lower(pairs.slices, gaps=gaps, wide_right=wide_right)
        rows = Spans.of([call.rows for call in calls], pairs.q_len)
        keys = Spans.of([call.keys for call in calls], pairs.k_len)
        return Lowered(calls, rows, keys)

    return pairs.made((lowered_of, gaps, wide_right), make)


def _attend(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, call: Call, pairs: Pairs, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """out and lse of one call's rows."""
    rows, keys = slice(*call.rows), slice(*call.keys)
    hull = [q[:, rows], k[:, keys], v[:, keys]]
    parts = []
    for entries, packing in _batches(call, pairs, hull):
        q_, k_, v_ = (_pack(t[entries], packing) for t in hull)
        out, lse = attend(q_, k_, v_, call.window, packing, scoring)
        if call.skips_rows:  # some libraries write +inf there
            lse = lse.masked_fill(lse == torch.inf, -torch.inf)
        parts.append((_unpack(out, packing, entries), _unpack_stats(lse, packing, entries)))
    out, lse = map(_together, zip(*parts, strict=True))
    return out, lse


def _batches(call: Call, pairs: Pairs, hull: list[Tensor]) -> list[tuple[slice, Packing | None]]:
    """Which batch entries go into one call, and how they are packed there: all as they are if the
    call is one segment, all end to end where they lie so in memory, else each alone.

    Args:
        hull: [b, l, h, d] tensors of the call's rows or keys.
    """
    batch, device = hull[0].shape[0], hull[0].device
    if len(call.segments) == 1:
        return [(slice(batch), None)]
    flat = all(t.stride(0) == t.shape[1] * t.stride(1) for t in hull)
    together = batch if flat else 1

    def packing() -> Packing:
        return _packing(call, together, device)

    packed = pairs.made((call, together, device), packing)
    return [(slice(n, n + together), packed) for n in range(0, batch, together)]


def _packing(call: Call, batch: int, device: torch.device) -> Packing:
    """A call's segments, once for each batch entry."""
    lengths = call.lengths()
    ends = np.cumsum(np.tile(lengths, (batch, 1)), axis=0)
    cu_seqlens = np.concatenate([np.zeros((1, 2), dtype=np.int64), ends]).astype(np.int32).T
    cu_q, cu_k = (torch.from_numpy(x.copy()).to(device) for x in cu_seqlens)
    most_rows, most_keys = lengths.max(axis=0).tolist()
    # To FlashAttention-2 a longest of 1 says that every sequence has a row: some have none.
    return Packing(cu_q, cu_k, max(2, most_rows), most_keys)


def _pack(t: Tensor, packing: Packing | None) -> Tensor:
    """[b, l, h, d] -> [b l, h, d], a view."""
    return t if packing is None else t.flatten(0, 1)


def _unpack(t: Tensor, packing: Packing | None, entries: slice) -> Tensor:
    """[b l, h, d] -> [b, l, h, d]."""
    return t if packing is None else t.unflatten(0, (entries.stop - entries.start, -1))


def _pack_stats(t: Tensor, packing: Packing | None) -> Tensor:
    """[b, h, l] -> [h, b l], contiguous."""
    return t.contiguous() if packing is None else t.transpose(0, 1).flatten(1).contiguous()


def _unpack_stats(t: Tensor, packing: Packing | None, entries: slice) -> Tensor:
    """[h, b l] -> [b, h, l]."""
    if packing is None:
        return t
    return t.unflatten(1, (entries.stop - entries.start, -1)).transpose(0, 1)


def _together(parts: tuple[Tensor, ...]) -> Tensor:
    """The batch entries of several calls."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
