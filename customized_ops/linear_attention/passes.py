"""One rank's forward and backward: the states of its segments, what travels, the rest.

    forward     segments that begin their document run up to their states, then compute out; those
                that follow run when states arrive, or make maps first (see :mod:`.chains`)
    backward    the same from the end: gradients of what entered a segment, by the transposed maps

Where documents do not span segments, a pass is only a call of the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .chains import Scan
from .kernels import Backward, Forward, Gradients
from .kernels.protocol import tokens_of
from .maps import transposed
from .parts import Part, PartTokens, Pass, some
from .rank_call import RankCall


class Saved(NamedTuple):
    """What the backward needs besides the operands.

    Attributes:
        states: [entries, b, hv, dk, dv + dk or 1]: for each entry (:attr:`.LocalSegments.entries`)
            the state that enters its segment, and the segment's A.
        kept: [b, t, hv, c], what the kernel keeps.
    """

    states: Tensor
    kept: Tensor


def forward(call: RankCall, initial: Tensor | None) -> tuple[Tensor, Tensor, Saved]:
    """The forward of a rank.

    Args:
        initial: [m, b, hv, dk, dv], for the rank's segments, 0 for those that do not begin a
            document; None if it is 0 for all.
    Returns:
        out; the states that leave the segments; and what the backward needs.
    """
    scan = call.scan()
    if scan is not None:
        run = _ForwardPass(call, scan, initial)
        run.go()
        return run.out.whole, run.left, Saved(run.saved, run.kept.whole)
    alone = call.kernel.forward(call.x)
    final = alone.states(initial)
    return alone.out(), final, Saved(_nothing_saved(call), alone.kept())


def backward(
    call: RankCall, initial: Tensor | None, saved: Saved, dout: Tensor, dfinal: Tensor | None
) -> Gradients:
    """The backward of a rank.

    Args:
        initial, saved: as in :func:`forward`.
        dfinal: [m, b, hv, dk, dv], for the states that leave segments, 0 for those that do not end
            a document; None if it is 0 for all.
    """
    scan = call.scan(backward=True)
    if scan is not None:
        run = _BackwardPass(call, scan, initial, saved, dout, dfinal)
        run.go()
        grads = {name: each.whole for name, each in run.grads.items()}
        return Gradients(**grads, initial=run.left)
    alone = call.kernel.backward(call.x, initial, saved.kept, dout)
    alone.initial(dfinal)
    return alone.gradients({})


class _ForwardPass(Pass):
    def __init__(self, call: RankCall, scan: Scan, initial: Tensor | None) -> None:
        super().__init__(call, scan, call.local.last, initial)
        x, self.saved = call.x, _nothing_saved(call)
        width = call.kernel.kept_width(x)
        kept = x.v.new_empty(()).expand(*x.v.shape[:3], width)
        self.out, self.kept = (PartTokens(like, x, len(self.parts)) for like in (x.v, kept))

    def make(self, segments: Sequence[int]) -> Forward:
        return self.call.kernel.forward(self.call.x.part(segments))

    def ahead(self, run: Forward) -> None:
        """Nothing: a kernel's forward does this work when it begins."""

    def matrices(self, part: Part, run: Forward) -> Tensor:
        return run.matrices()

    def leave(self, run: Forward, entered: Tensor | None) -> Tensor:
        return run.states(entered)

    def rest(self, part: Part, run: Forward) -> None:
        self.out.put(part.segments, run.out(self.out.view(part.segments)))
        self.kept.put(part.segments, run.kept())
        if part.known:
            self._save(part)

    def _save(self, part: Part) -> None:
        """Keep the states that other segments sent, and A of each segment."""
        states = self.entered(part)
        for n, segment in enumerate(part.segments):
            a = self.maps.a[self.row[segment]]
            a = a.expand(*states.shape[1:-1], self.call.x.matrix_width)
            self.saved[self.call.local.entry[segment]] = torch.cat([states[n], a], -1)


class _BackwardPass(Pass):
    def __init__(
        self,
        call: RankCall,
        scan: Scan,
        initial: Tensor | None,
        saved: Saved,
        dout: Tensor,
        dfinal: Tensor | None,
    ) -> None:
        super().__init__(call, scan, call.local.first, dfinal)
        local, x, dv = call.local, call.x, call.x.v.shape[-1]
        self.saved, self.dout = saved, dout
        self.initial = x.empty_states(len(local)) if initial is None else initial.clone()
        for n in np.flatnonzero(~local.first).tolist():
            self.initial[n] = saved.states[local.entry[n], ..., :dv]
        self.grads = {name: PartTokens(t, x, len(self.parts)) for name, t in x.tensors.items()}

    def make(self, segments: Sequence[int]) -> Backward:
        x = self.call.x
        kept, dout = (tokens_of(t, x.bounds(segments)) for t in (self.saved.kept, self.dout))
        initial = some(self.initial, segments)
        return self.call.kernel.backward(x.part(segments), initial, kept, dout)

    def ahead(self, run: Backward) -> None:
        run.ahead()

    def matrices(self, part: Part, run: Backward) -> Tensor:
        of_part = some(self.saved.states, self.call.local.entry[part.segments].tolist())
        return transposed(of_part[..., self.call.x.v.shape[-1] :])

    def leave(self, run: Backward, entered: Tensor | None) -> Tensor | None:
        return run.initial(entered)

    def rest(self, part: Part, run: Backward) -> None:
        views = {name: each.view(part.segments) for name, each in self.grads.items()}
        found = run.gradients({n: v for n, v in views.items() if v is not None})
        for name, each in self.grads.items():
            each.put(part.segments, getattr(found, name))


def _nothing_saved(call: RankCall) -> Tensor:
    """:attr:`Saved.states`, filled with zeros."""
    return call.x.empty_states(call.local.entries, call.x.matrix_width)
