"""Documents with the lengths of a real corpus."""

from __future__ import annotations

import numpy as np

# Document lengths in tokens of a long-context SFT corpus, as published with MagiAttention's
# benchmark. Shortest, longest (both included), number of documents.
LENGTHS = (
    (1, 10, 30_254),
    (11, 50, 391_188),
    (51, 100, 699_596),
    (101, 200, 1_377_757),
    (201, 500, 3_794_735),
    (501, 1024, 3_316_785),
    (1025, 2048, 2_106_566),
    (2049, 4096, 988_525),
    (4097, 8192, 410_002),
    (8193, 16384, 173_574),
    (16385, 32768, 115_007),
    (32769, 65536, 18_428),
    (65537, 131072, 22_513),
    (131073, 196608, 18_284),
)


def document_bounds(
    tokens: int, seed: int, multiple: int = 1, most: int | None = None
) -> tuple[int, ...]:
    """Cumulative lengths, from 0 to ``tokens``, of documents drawn from LENGTHS.

    A range is picked in proportion to its count, then a length uniformly within it; a length above
    ``most`` is drawn again. The last document is cut to fit.

    Args:
        multiple: lengths are rounded up to a multiple of it, as needed by peers that cut every
            document into equal chunks; it divides ``tokens``.
        most: a quarter of ``tokens`` if None.
    """
    if tokens % multiple:
        raise ValueError(f"tokens must be a multiple of {multiple}, got {tokens}")
    if most is None:
        most = max(tokens // 4, multiple)
    draw = np.random.default_rng(seed)
    shortest, longest, count = np.array(LENGTHS).T
    bounds = [0]
    while bounds[-1] < tokens:
        kind = draw.choice(len(count), p=count / count.sum())
        length = int(draw.integers(shortest[kind], longest[kind] + 1))
        if length <= most:
            length += -length % multiple
            bounds.append(min(tokens, bounds[-1] + length))
    return tuple(bounds)
