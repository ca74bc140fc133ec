"""Which tokens of a tensor the calls cover, and the sum of their results."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import compress

import numpy as np
import torch
from torch import Tensor

from ...mask.intervals import depth
from ...merge.merge import accumulation_dtype
from ...tape import allocate, launch
from .lowering import Range


@dataclass(frozen=True)
class Spans:
    """Which of all rows, or keys, the calls cover."""

    whole: bool  # whether there is one call, and it covers everything at once
    # Of each call, whether it overlaps no earlier one. The results of a fresh call are written
    # where they belong; those of others are added or merged.
    fresh: tuple[bool, ...]
    outside: tuple[Range, ...]  # what is in no fresh call
    most: int  # the largest number of calls that share a token

    @classmethod
    def of(cls, ranges: list[Range], length: int) -> Spans:
        """The spans of calls over ``ranges`` in [0, length), none of them empty."""
        fresh: list[bool] = []
        starts: list[int] = []  # of what the calls so far cover, ascending
        stops: list[int] = []
        for start, stop in ranges:
            met = slice(bisect_right(stops, start), bisect_left(starts, stop))
            fresh.append(met.start == met.stop)
            starts[met], stops[met] = [min(starts[met] + [start])], [max(stops[met] + [stop])]
        outside, done = [], 0
        for start, stop in [*sorted(compress(ranges, fresh)), (length, length)]:
            if start > done:
                outside.append((done, start))
            done = stop
        most = min(1, len(ranges)) if all(fresh) else depth(*np.array(ranges).T)
        return cls(ranges == [(0, length)], tuple(fresh), tuple(outside), most)

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which the calls' results, of ``dtype``, are added up.

        It is their own where no token has more than two: torch adds two numbers in fp32 and rounds
        once. That equals the sum in a wide tensor, rounded at the end, at half the bytes. A third
        would be added to a rounded sum.
        """
        return dtype if self.most <= 2 else accumulation_dtype(dtype)


class Gradient:
    """The gradient of one tensor, ``total``, added up from those of the calls' parts of it. It is
    [b, l, h, d], in ``dtype`` or, for None, that of :meth:`Spans.dtype`. Where one call covers
    everything, it is what that call returned."""

    def __init__(self, like: Tensor, spans: Spans, dtype: torch.dtype | None = None) -> None:
        self._spans, self._dtype, self.total = spans, like.dtype, like
        if not spans.whole:
            dtype = dtype or spans.dtype(like.dtype)
            self.total = allocate(like.new_empty, like.shape, dtype=dtype)
            for start, stop in spans.outside:
                launch(Tensor.zero_, self.total.narrow(1, start, stop - start))

    def takes(self, n: int) -> bool:
        """Whether the library may write the part of call ``n`` into the total."""
        spans = self._spans
        return not spans.whole and spans.fresh[n] and self.total.dtype == self._dtype

    def add(self, n: int, part: Tensor, place: Tensor) -> None:
        """Write or add the part of call ``n`` to its ``place``, a view of the total, and own it."""
        if self._spans.whole:
            self.total = part
        elif self._spans.fresh[n]:
            launch(Tensor.copy_, place, part)
        else:
            launch(Tensor.add_, place, part)
