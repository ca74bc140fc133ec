"""Lengths rounded up to few numbers: what a device is given for some documents does for others,
too, where all lengths in it are the same."""

from __future__ import annotations


def in_steps(n: int, each: int) -> int:
    """``n``, at least 1, rounded up to one of ``each`` numbers between powers of two; ``each`` is a
    power of two."""
    step = max((1 << (n - 1).bit_length()) // (2 * each), 1)
    return -(-n // step) * step
