"""What a kernel is: attention over slices on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..slices import Slices
from .scoring import Scoring, Tokens


@dataclass(frozen=True)
class Capabilities:
    """What a kernel can do. A request outside of it is refused, never approximated."""

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    features: tuple[str, ...] = ()  # of those that Scoring.features names

    def refuses(self, q: Tensor, scoring: Scoring) -> str | None:
        """Why this kernel cannot take the request, or None if it can."""
        if q.device.type not in self.devices:
            return f"runs on {', '.join(self.devices)}, not {q.device.type}"
        if q.dtype not in self.dtypes:
            return f"takes {', '.join(str(d) for d in self.dtypes)}, not {q.dtype}"
        lacking = [feature for feature in scoring.features if feature not in self.features]
        if lacking:
            return f"has no {', '.join(lacking)}"
        return None


class Kernel(Protocol):
    """A module of this package, seen as a kernel.

    Shapes: q [b, i, h, d], k [b, j, g, d], v [b, j, g, e] with h a multiple of g (grouped-query
    attention: query head n reads kv head n // (h / g)); strides are free but d and e are dense.
    ``slices`` int64[n, 6] are normalised and count rows of q and k; rows that no slice covers give
    out 0 and lse -inf. ``tokens`` may be None unless ``scoring.needs_tokens``.
    """

    CAPABILITIES: Capabilities

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slices: Slices,
        scoring: Scoring,
        tokens: Tokens | None,
    ) -> tuple[Tensor, Tensor]:
        """Returns out [b, i, h, e] (q's dtype or wider) and lse [b, h, i] (fp32, fp64 for fp64).

        Both are of these slices alone: k may be a part of a row's keys, to be merged with others.
        """
        ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        slices: Slices,
        scoring: Scoring,
        tokens: Tokens | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of these slices, given the rows' final out and lse over all their keys.

        In the inputs' dtypes or wider: the executor adds them up over stages and ranks.
        """
        ...
