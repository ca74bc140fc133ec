"""Which rows of a block have a part already."""

from __future__ import annotations

Piece = tuple[int, int, bool]  # first row, one past the last, whether the rows had a part before


class RowCoverage:
    """A set of rows that grows by ranges; a step has a handful of them, so plain lists will do."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []  # disjoint, apart and sorted

    def add(self, start: int, stop: int) -> list[Piece]:
        """Take in rows start .. stop - 1; their pieces, in order."""
        if start == stop:
            return []
        if not self._ranges:
            self._ranges = [(start, stop)]
            return [(start, stop, False)]
        if len(self._ranges) == 1 and self._ranges[0][0] <= start and stop <= self._ranges[0][1]:
            return [(start, stop, True)]
        before = [r for r in self._ranges if r[1] < start]
        after = [r for r in self._ranges if r[0] > stop]
        met = self._ranges[len(before) : len(self._ranges) - len(after)]
        pieces, at = [], start
        for first, last in met:
            first, last = max(first, start), min(last, stop)
            if at < first:
                pieces.append((at, first, False))
            if first < last:
                pieces.append((first, last, True))
            at = last
        if at < stop:
            pieces.append((at, stop, False))
        bounds = [*met, (start, stop)]
        joined = min(first for first, _ in bounds), max(last for _, last in bounds)
        self._ranges = [*before, joined, *after]
        return pieces

    def rest(self, length: int) -> list[Piece]:
        """Take in the rows of 0 .. length - 1 that were not there; their pieces, in order."""
        if self._ranges == [(0, length)]:
            return []
        return [piece for piece in self.add(0, length) if not piece[2]]
