"""What a kernel of linear attention is: it runs along segments on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

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
        scale: of q.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None
    ends: Ints
    scale: float

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that there are, by name."""
        named = {name: getattr(self, name) for name in ("q", "k", "v", "g", "beta")}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def state_dtype(self) -> torch.dtype:
        """That of states: fp32, fp64 for fp64."""
        return accumulation_dtype(self.q.dtype)

    def empty_states(self, segments: int) -> Tensor:
        """States for so many segments, [segments, b, hv, dk, dv], of zeros."""
        b, _, hv, dv = self.v.shape
        shape = (segments, b, hv, self.q.shape[-1], dv)
        return self.v.new_zeros(shape, dtype=self.state_dtype)

    def part(self, segments: Sequence[int]) -> Operands:
        """Some of the segments."""
        bounds = [(int(self.ends[n]), int(self.ends[n + 1])) for n in segments]
        lengths = [stop - start for start, stop in bounds]
        parts: dict[str, Any] = {name: tokens_of(x, bounds) for name, x in self.tensors.items()}
        return replace(self, **parts, ends=_cumulative(lengths))


def tokens_of(x: Tensor, bounds: Sequence[tuple[int, int]]) -> Tensor:
    """Ranges of tokens, dim 1 of x, one after the other; a view where it is one."""
    views = [x[:, start:stop] for start, stop in bounds]
    if len(views) == 1:
        return views[0]
    return torch.cat(views, 1) if views else x[:, :0]


def _cumulative(lengths: Sequence[int]) -> Ints:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


class Gradients(NamedTuple):
    """Of what a forward was given, in any floating dtype.

    Attributes:
        initial: [m, b, hv, dk, dv]; None where no initial states were given.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None
    initial: Tensor | None


class Kernel(Protocol):
    """Linear attention along segments on one device. Importing it imports no optional package.

    States are [m, b, hv, dk, dv], one for each segment, in :attr:`Operands.state_dtype`; initial
    states and gradients of final ones may be None for 0. There may be no segment, and no token.
    """

    NAME: str

    def missing(self) -> str | None:
        """What keeps the kernel from running on this machine, or None."""

    def refuses(self, x: Operands) -> str | None:
        """Why it cannot run a call, from shapes, dtypes and device alone; or None."""

    def forward(self, x: Operands, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        """out [b, t, hv, dv] in v's dtype, and the final states."""

    def final_states(self, x: Operands, initial: Tensor | None) -> Tensor:
        """The second alone."""

    def backward(
        self, x: Operands, initial: Tensor | None, dout: Tensor, dfinal: Tensor | None
    ) -> Gradients:
        """From the gradients of out and of the final states."""

    def initial_gradient(self, x: Operands, dout: Tensor, dfinal: Tensor | None) -> Tensor:
        """The gradient of the initial states alone, which depends neither on v nor on them."""
