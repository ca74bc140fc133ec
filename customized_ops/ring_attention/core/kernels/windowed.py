"""Runs a kernel that knows windows over any pairs: lower, call, and put the parts together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .scoring import Scoring

Window = tuple[int, int]  # left, right of the bottom-right diagonal; -1 for no bound


@dataclass(frozen=True, eq=False)
class Packing:
    """Sequences laid end to end, the n-th rows with the n-th keys. Either may be empty: rows without
    keys give out 0, and keys without rows take gradient 0.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: int32[n + 1], on the device of q.
        max_seqlen_q, max_seqlen_k: tokens of the longest.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


class Attend(Protocol):
    """One call of a library's forward: one window, one sequence a batch entry or packed ones.

    q [b, i, h, d], k [b, j, g, d], v [b, j, g, e] -> out [b, i, h, e], lse [b, h, i] fp32; with a
    packing q [i, h, d], k [j, g, d], v [j, g, e] -> out [i, h, e], lse [h, i].
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
    """One call of a library's backward: dq, dk, dv in the inputs' dtype, shaped as they are."""

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
