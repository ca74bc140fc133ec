"""One rank's forward and backward: its segments' maps, their scan over ranks, then the kernel.

    forward     maps of the segments that others of their document follow -> scan -> all segments
                run from what enters them
    backward    transposed maps of those that follow others -> scan from the end -> all segments
                run back from the gradients of the states that leave them

Where documents do not span segments, the kernel is all there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
        title: the op's name, for errors.
        x: the rank's tokens in the order of the sequence.
        segments: of all ranks. comm: the ranks.
    """

    title: str
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


def forward(call: RankCall, initial: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """
    Args:
        initial: [m, b, hv, dk, dv], of the rank's segments, 0 for those that do not begin a
            document; None if it is 0 for all.
    Returns:
        out; the states that leave the segments; and for the backward [entries, b, hv, dk, dv + dk
        or 1]: of each entry (:attr:`.LocalSegments.entries`) what enters its segment, and its A.
    """
    local, x = call.local, call.x
    saved = x.empty_states(local.entries)
    saved = torch.cat([saved, saved[..., :1].expand(*saved.shape[:-1], call.matrix_width)], -1)
    scan = scan_of(call.segments, call.map_bytes(), call.comm.costs)
    if scan is not None:
        chained = np.flatnonzero(local.chained)
        maps = _maps(call, initial, chained, ~local.last[chained])
        states = entering_states(maps, scan, call.comm, f"{call.title}, forward")
        initial = x.empty_states(len(local)) if initial is None else initial.clone()
        for row, n in enumerate(chained.tolist()):
            if not local.first[n]:
                initial[n] = states[row]
                a = maps.a[row].expand(*states.shape[1:-1], call.matrix_width)
                saved[local.entry[n]] = torch.cat([states[row], a], -1)
    out, final = call.kernel.forward(x, initial)
    return out, final, saved


def backward(
    call: RankCall, initial: Tensor | None, saved: Tensor, dout: Tensor, dfinal: Tensor | None
) -> Gradients:
    """
    Args:
        initial, saved: as of :func:`forward`.
        dfinal: [m, b, hv, dk, dv], of the states that leave segments, 0 for those that do not end
            a document; None if it is 0 for all.
    """
    local, x = call.local, call.x
    scan = scan_of(call.segments, call.map_bytes(), call.comm.costs, backward=True)
    if scan is not None:
        chained = np.flatnonzero(local.chained)
        followers = chained[~local.first[chained]]
        initial = x.empty_states(len(local)) if initial is None else initial.clone()
        dv = x.v.shape[-1]
        for n in followers.tolist():
            initial[n] = saved[local.entry[n], ..., :dv]
        maps = _transposed_maps(call, saved, dout, dfinal, chained)
        states = entering_states(maps, scan, call.comm, f"{call.title}, backward")
        dfinal = x.empty_states(len(local)) if dfinal is None else dfinal.clone()
        for row, n in enumerate(chained.tolist()):
            if not local.last[n]:
                dfinal[n] = states[row]
    return call.kernel.backward(x, initial, dout, dfinal)


def _maps(call: RankCall, initial: Tensor | None, chained: Ints, followed: Bools) -> StateMaps:
    """Maps of the rank's chained segments; 0 where nothing follows, and nobody asks for it.

    That of a segment which begins its document is the state that leaves it. A dense A is what the
    kernel makes of the unit matrix as a state, with values of 0: dk more columns of v.
    """
    local, x = call.local, call.x
    maps = _no_maps(call, len(chained))
    begins = local.first[chained]
    for rows, inner in ((followed & begins, False), (followed & ~begins, True)):
        if not rows.any():
            continue
        numbers, at = chained[rows].tolist(), np.flatnonzero(rows).tolist()
        part = x.part(numbers)
        state = part.empty_states(len(numbers)) if initial is None else _some(initial, numbers)
        if inner and call.dense:
            dk = x.q.shape[-1]
            unit = torch.eye(dk, dtype=state.dtype, device=state.device)
            part = replace(part, v=torch.nn.functional.pad(part.v, (dk, 0)))
            state = torch.cat([unit.expand(*state.shape[:-1], dk), state], -1)
            a, b = call.kernel.final_states(part, state).split((dk, x.v.shape[-1]), -1)
        else:
            b = call.kernel.final_states(part, state)
            a = _decay(part) if inner else torch.zeros_like(maps.a[: len(at)])
        for n, row in enumerate(at):
            maps.a[row], maps.b[row] = a[n], b[n]
    return maps


def _transposed_maps(
    call: RankCall, saved: Tensor, dout: Tensor, dfinal: Tensor | None, chained: Ints
) -> StateMaps:
    """Maps of gradients: from that of the state that leaves a segment to that of what enters it."""
    local, x = call.local, call.x
    maps = _no_maps(call, len(chained))
    at = np.flatnonzero(~local.first[chained]).tolist()
    if not at:
        return maps
    numbers = chained[at].tolist()
    bounds = [(int(local.ends[n]), int(local.ends[n + 1])) for n in numbers]
    part = x.part(numbers)
    of_final = None if dfinal is None else _some(dfinal, numbers)
    b = call.kernel.initial_gradient(part, tokens_of(dout, bounds), of_final)
    if call.dense:
        a = transposed(_some(saved, local.entry[numbers].tolist())[..., x.v.shape[-1] :])
    else:
        a = _decay(part)
    for n, row in enumerate(at):
        maps.a[row], maps.b[row] = a[n], b[n]
    return maps


def _some(states: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows, by views: an index would be copied to the device, and waited for."""
    return torch.stack([states[row] for row in rows])


def _no_maps(call: RankCall, count: int) -> StateMaps:
    b = call.x.empty_states(count)
    dk = b.shape[-2]
    rows = dk if call.dense or call.x.g.ndim == 4 else 1
    return StateMaps(b.new_zeros(*b.shape[:-2], rows, dk if call.dense else 1), b)


def _decay(x: Operands) -> Tensor:
    """A of gates alone, the decay over each segment: [m, b, hv, dk or 1, 1]."""
    ends = zip(x.ends[:-1].tolist(), x.ends[1:].tolist(), strict=True)
    total = torch.stack([x.g[:, a:b].to(x.state_dtype).sum(1) for a, b in ends])
    return total.exp().reshape(*total.shape[:3], -1, 1)
