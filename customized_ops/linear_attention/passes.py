"""One rank's forward and backward: its segments' maps, their scan over ranks, then the kernel.

    forward     segments that begin their document run up to their states; maps of those that follow
                and are followed -> scan -> states of all that follow, then out
    backward    segments that end their document run back up to the gradients of what entered them,
                and so on from the end, by the transposed maps

Where documents do not span segments, the kernel is all there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..along_sequence import LocalSegments, Segments
from ..ring_attention.core.arrays import Bools, Ints
from ..ring_attention.core.comm import Comm
from .chains import MapBytes, scan_of
from .kernels import Gradients, Kernel, Operands
from .kernels.protocol import tokens_of
from .maps import StateMaps, entering_states, transposed


@dataclass(frozen=True)
class RankCall:
    """A call on one rank.

    Attributes:
        x: the rank's tokens in the order of the sequence.
        segments: of all ranks. comm: the ranks.
    """

    x: Operands
    segments: Segments
    comm: Comm
    kernel: Kernel

    @property
    def local(self) -> LocalSegments:
        """The rank's segments."""
        return self.segments.local(self.comm.rank)

    @property
    def dense(self) -> bool:
        """Whether maps have dense matrices, as those of the delta rule have."""
        return self.x.beta is not None

    @property
    def matrix_width(self) -> int:
        """Columns of A as it is saved."""
        return self.x.q.shape[-1] if self.dense else 1

    def map_bytes(self) -> MapBytes:
        """Of one segment's map."""
        b, _, hv, dv = self.x.v.shape
        return map_bytes(self.dense, self.x.g.ndim == 4, b, hv, self.x.q.shape[-1], dv)


def map_bytes(dense: bool, channels: bool, b: int, hv: int, dk: int, dv: int) -> MapBytes:
    """Bytes of a segment's map in fp32: of the delta rule, or of gates alone, a head or channel."""
    a = dk * dk if dense else dk if channels else 1
    return MapBytes(4 * b * hv * a, 4 * b * hv * dk * dv)


class Saved(NamedTuple):
    """What the backward needs besides the operands.

    Attributes:
        states: [entries, b, hv, dk, dv + dk or 1]: of each entry (:attr:`.LocalSegments.entries`)
            what enters its segment, and its A.
        kept: [b, t, hv, c] of the kernel.
    """

    states: Tensor
    kept: Tensor


def forward(call: RankCall, initial: Tensor | None) -> tuple[Tensor, Tensor, Saved]:
    """
    Args:
        initial: [m, b, hv, dk, dv], of the rank's segments, 0 for those that do not begin a
            document; None if it is 0 for all.
    Returns:
        out; the states that leave the segments; and what is for the backward.
    """
    local, x = call.local, call.x
    saved = x.empty_states(local.entries)
    saved = torch.cat([saved, saved.new_zeros(*saved.shape[:-1], call.matrix_width)], -1)
    scan = scan_of(call.segments, call.map_bytes(), call.comm.costs)
    if scan is None:
        run = call.kernel.forward(x)
        final = run.states(initial)
        return run.out(), final, Saved(saved, run.kept())
    maps, row = _no_maps(call), _rows(local)
    final = x.empty_states(len(local))
    runs = [(part, call.kernel.forward(x.part(part))) for part in _parts(local.first, local.last)]
    for part, run in runs:
        if local.first[part[0]]:
            _put(run.states(_some(initial, part)), final, part)
            _put(final, maps.b, row[part], part)
        elif not local.last[part[0]]:
            a = run.matrices() if call.dense else _decay(x.part(part))
            _put(a, maps.a, row[part])
            _put(run.states(None), maps.b, row[part])
    states = entering_states(maps, scan, call.comm)
    for part, run in runs:
        if not local.first[part[0]]:
            entering = _some(states, row[part])
            _put(run.states(entering), final, part)
            for n, r in zip(part, row[part], strict=True):
                a = maps.a[r].expand(*states.shape[1:-1], call.matrix_width)
                saved[local.entry[n]] = torch.cat([states[r], a], -1)
    out = _tokens(x.v, x, [(part, run.out()) for part, run in runs])
    width = call.kernel.kept_width(x)
    of_tokens = x.v.new_empty(()).expand(*x.v.shape[:3], width)
    kept = _tokens(of_tokens, x, [(part, run.kept()) for part, run in runs])
    return out, final, Saved(saved, kept)


def backward(
    call: RankCall, initial: Tensor | None, saved: Saved, dout: Tensor, dfinal: Tensor | None
) -> Gradients:
    """
    Args:
        initial, saved: as of :func:`forward`.
        dfinal: [m, b, hv, dk, dv], of the states that leave segments, 0 for those that do not end
            a document; None if it is 0 for all.
    """
    local, x = call.local, call.x
    scan = scan_of(call.segments, call.map_bytes(), call.comm.costs, backward=True)
    if scan is None:
        run = call.kernel.backward(x, initial, saved.kept, dout)
        run.initial(dfinal)
        return run.gradients()
    maps, row, dv = _no_maps(call), _rows(local), x.v.shape[-1]
    initial = x.empty_states(len(local)) if initial is None else initial.clone()
    for n in np.flatnonzero(~local.first).tolist():
        initial[n] = saved.states[local.entry[n], ..., :dv]
    dinitial = x.empty_states(len(local))
    runs = []
    for part in _parts(local.last, local.first):
        states = _some(initial, part)
        kept, tokens = (tokens_of(t, x.bounds(part)) for t in (saved.kept, dout))
        runs.append((part, call.kernel.backward(x.part(part), states, kept, tokens)))
    for part, run in runs:
        if local.last[part[0]]:
            _put(run.initial(_some(dfinal, part)), dinitial, part)
            _put(dinitial, maps.b, row[part], part)
        elif not local.first[part[0]]:
            _put(run.initial(None), maps.b, row[part])
            of_part = _some(saved.states, local.entry[part].tolist())[..., dv:]
            _put(transposed(of_part) if call.dense else _decay(x.part(part)), maps.a, row[part])
    for part, run in runs:
        if not local.last[part[0]]:
            run.ahead()
    states = entering_states(maps, scan, call.comm)
    for part, run in runs:
        if not local.last[part[0]]:
            _put(run.initial(_some(states, row[part])), dinitial, part)
    found = [(part, run.gradients()) for part, run in runs]
    of_tokens: dict[str, Any] = {
        name: _tokens(like, x, [(part, getattr(grads, name)) for part, grads in found])
        for name, like in x.tensors.items()
    }
    return Gradients(**{"beta": None, **of_tokens}, initial=dinitial)


def _parts(begin: Bools, end: Bools) -> list[Sequence[int]]:
    """The rank's segments where a scan passes: those that begin its chains, that end them but do
    not begin them, and those between. A kernel runs each part by itself."""
    which = (begin, ~begin & end, ~begin & ~end)
    return [np.flatnonzero(each).tolist() for each in which if each.any()]


def _rows(local: LocalSegments) -> Ints:
    """int64[m]: of each segment its place among the chained ones, -1 where it is none of them."""
    return np.where(local.chained, np.cumsum(local.chained) - 1, -1)


def _put(
    source: Tensor | None, into: Tensor, rows: Sequence[int] | Ints, source_rows: Sequence[int] = ()
) -> None:
    """Copy states, one by one: an index would be copied to the device. Row -1 is nowhere."""
    assert source is not None
    for n, row in enumerate(rows):
        if row >= 0:
            into[row] = source[source_rows[n] if source_rows else n]


def _tokens(like: Tensor, x: Operands, parts: Sequence[tuple[Sequence[int], Tensor]]) -> Tensor:
    """Of all segments, from parts of them."""
    if len(parts) == 1:
        return parts[0][1]
    whole = like.new_empty(like.shape, dtype=parts[0][1].dtype if parts else None)
    for segments, part in parts:
        at = 0
        for start, stop in x.bounds(segments):
            whole[:, start:stop] = part[:, at : at + stop - start]
            at += stop - start
    return whole


def _some(states: Tensor | None, rows: Sequence[int] | Ints) -> Any:
    """Some rows, by views: an index would be copied to the device, and waited for."""
    if states is None:
        return None
    first, last = int(rows[0]), int(rows[-1])
    if last - first == len(rows) - 1:
        return states[first : last + 1]  # rows increase
    return torch.stack([states[row] for row in rows])


def _no_maps(call: RankCall) -> StateMaps:
    """Maps of the rank's chained segments, of zeros; they stay so where nobody asks."""
    b = call.x.empty_states(int(call.local.chained.sum()))
    dk = b.shape[-2]
    rows = dk if call.dense or call.x.g.ndim == 4 else 1
    return StateMaps(b.new_zeros(*b.shape[:-2], rows, dk if call.dense else 1), b)


def _decay(x: Operands) -> Tensor:
    """A of gates alone, the decay over each segment: [m, b, hv, dk or 1, 1]."""
    ends = zip(x.ends[:-1].tolist(), x.ends[1:].tolist(), strict=True)
    total = torch.stack([x.g[:, a:b].to(x.state_dtype).sum(1) for a, b in ends])
    return total.exp().reshape(*total.shape[:3], -1, 1)
