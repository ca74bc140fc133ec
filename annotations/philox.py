"""Random numbers that are a pure function of a counter and a key: Philox4x32-10.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A 128-bit counter gives four
random 32-bit words. There is no state to keep or restore: the backward computes the forward's
numbers again, and they do not depend on how tensors are cut or on the kernel.

Words are int64 tensors that hold 32 bits: torch has little arithmetic on unsigned integers.
"""

from __future__ import annotations

from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
LOW = 0xFFFFFFFF  # the low 32 bits
WORDS = 4

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four random words for each counter.

    Args:
        counter: int64 tensors of 32-bit values that broadcast against each other.
        key: likewise.
    Returns:
        int64 tensors of 32-bit values, of the broadcast shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _product(c0, MULTIPLIERS[0])
        high1, low1 = _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW, (k1 + KEY_STEPS[1]) & LOW
    return c0, c1, c2, c3


def threshold(p: float) -> int:
    """The number below which words are dropped: a fraction p of all words."""
    return round(p * 2**32)


def _product(x: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low word of the 64-bit product. int64 wraps to the right bits; the mask after the
    shift removes the sign bits of an arithmetic shift."""
    product = x * multiplier
    return (product >> 32) & LOW, product & LOW
