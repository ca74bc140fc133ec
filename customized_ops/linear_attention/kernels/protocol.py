"""What a kernel of linear attention is: it runs along segments on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ...along_sequence.kernel_choice import Candidate
from ...ring_attention.core.arrays import Ints
from ...ring_attention.core.merge.merge import accumulation_dtype


@dataclass(frozen=True)
class Operands:
    """The tokens of a call on one rank, its segments one after the other.

    Attributes:
        q, k: [b, t, h, dk]. v: [b, t, hv, dv]; hv is a multiple of h.
        g: [b, t, hv] or [b, t, hv, dk]: log decays.
        beta: [b, t, hv] for the delta rule, None for gates alone.
        ends: int64[m + 1]: cumulative lengths of the segments, none of them empty.
        scale: what q is multiplied by.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None
    ends: Ints
    scale: float

    @property
    def delta(self) -> bool:
        """Whether this is the delta rule, whose maps of states have dense matrices."""
        return self.beta is not None

    @property
    def channels(self) -> bool:
        """Whether each channel has a decay of its own."""
        return self.g.ndim == 4

    @property
    def matrix_width(self) -> int:
        """Columns of a segment's A, which is diagonal for gates alone."""
        return self.q.shape[-1] if self.delta else 1

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are given, by name."""
        named = {name: getattr(self, name) for name in ("q", "k", "v", "g", "beta")}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def bounds(self, segments: Sequence[int]) -> list[tuple[int, int]]:
        """Where the tokens of segments begin and end."""
        return [(int(self.ends[n]), int(self.ends[n + 1])) for n in segments]

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of states: fp32, or fp64 for fp64."""
        return accumulation_dtype(self.q.dtype)

    def empty_states(self, segments: int, more: int = 0) -> Tensor:
        """States of zeros for this many segments, [segments, b, hv, dk, dv + more]."""
        b, _, hv, dv = self.v.shape
        shape = (segments, b, hv, self.q.shape[-1], dv + more)
        return self.v.new_zeros(shape, dtype=self.state_dtype)

    def part(self, segments: Sequence[int]) -> Operands:
        """The operands of some of the segments."""
        bounds = self.bounds(segments)
        ends = np.cumsum([0, *(stop - start for start, stop in bounds)], dtype=np.int64)
        parts: dict[str, Any] = {name: tokens_of(x, bounds) for name, x in self.tensors.items()}
        return replace(self, **parts, ends=ends)


def tokens_of(x: Tensor, bounds: Sequence[tuple[int, int]]) -> Tensor:
    """Ranges of tokens, dim 1 of x, concatenated; a view where they form one range."""
    merged: list[tuple[int, int]] = []
    for start, stop in bounds:
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, stop))
    views = [x[:, start:stop] for start, stop in merged]
    if len(views) == 1:
        return views[0]
    return torch.cat(views, 1) if views else x[:, :0]


class Gradients(NamedTuple):
    """Gradients of a forward's inputs, in any floating dtype.

    Attributes:
        initial: [m, b, hv, dk, dv]; None where no initial states were given.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None = None
    initial: Tensor | None = None


class Forward(Protocol):
    """A forward along segments, in steps between which states may come from other ranks.

    States are [m, b, hv, dk, dv], one for each segment, in :attr:`Operands.state_dtype`. Initial
    states and gradients of final states may be None, which means 0. There may be no segments, and
    no tokens.
    """

    def states(self, initial: Tensor | None) -> Tensor:
        """The final states; may be called again with other initial ones."""

    def matrices(self) -> Tensor:
        """A of each segment, [m, b, hv, dk, dk], whose final state is A S + b; for the delta rule
        only."""

    def out(self, into: Tensor | None = None) -> Tensor:
        """[b, t, hv, dv] in v's dtype, for the initial states that were given last. A kernel may
        write the result to ``into`` and return that, which saves a copy."""

    def kept(self) -> Tensor:
        """[b, t, hv, c] in v's dtype, kept for the backward; does not depend on any state."""


class Backward(Protocol):
    """A backward along segments, in steps like those of :class:`Forward`."""

    def initial(self, dfinal: Tensor | None) -> Tensor | None:
        """The gradient of the initial states, None where these are None; may be called again."""

    def ahead(self) -> None:
        """Compute whatever does not need the gradients of final states."""

    def gradients(self, into: Mapping[str, Tensor]) -> Gradients:
        """The gradients, for the gradients of final states that were given last. ``into``, by name
        and in the operands' dtypes, is as in :meth:`Forward.out`."""


class Kernel(Candidate, Protocol):
    """Linear attention along segments on one device; accepts or refuses :class:`Operands`."""

    def kept_width(self, x: Operands) -> int:
        """c of :meth:`Forward.kept`, 0 if nothing is kept; from shapes, dtypes and device alone."""

    def forward(self, x: Operands) -> Forward:
        """A forward; see :class:`Forward`."""

    def backward(self, x: Operands, initial: Tensor | None, kept: Tensor, dout: Tensor) -> Backward:
        """A backward, from the initial states, what the forward kept, and the gradient of out."""


def nothing_kept(x: Operands) -> Tensor:
    """:meth:`Forward.kept` of a kernel that keeps nothing."""
    return x.v.new_empty(*x.v.shape[:3], 0)


def unit_states(x: Operands) -> tuple[Operands, Tensor]:
    """Operands and initial states whose final states are the matrices A: values of 0, and a unit
    matrix as each state."""
    (b, t, hv, _), dk = x.v.shape, x.q.shape[-1]
    zeros = replace(x, v=x.v.new_zeros(b, t, hv, dk))
    states = zeros.empty_states(len(x.ends) - 1)
    return zeros, states + torch.eye(dk, dtype=states.dtype, device=states.device)
