"""What kind of mask a kernel is asked for: what its speed depends on, and whether it needs windows.

| class | slices | |
|---|---|---|
| full | one | whose band binds nowhere |
| causal | one | bound above only: how far ahead a row attends |
| packed | several, no row and no key in two | none bound below: documents |
| window | one or several, no row and no key in two | some bound below: how far back a row attends |
| sparse | | any others |

No torch here: masks are host-side arithmetic.
"""

from __future__ import annotations

from functools import lru_cache

from ..mask import AttnMask
from ..mask.intervals import depth
from ..mask.slices import HI, K0, K1, LO, Q0, Q1

SHAPE_CLASSES = ("full", "causal", "packed", "window", "sparse")


@lru_cache(maxsize=64)
def shape_class(mask: AttnMask) -> str:
    """The class of a mask, one of SHAPE_CLASSES. A mask that attends nothing is "full"."""
    slices = mask.slices
    if depth(slices[:, Q0], slices[:, Q1]) > 1 or depth(slices[:, K0], slices[:, K1]) > 1:
        return "sparse"
    if needs_window(mask):
        return "window"
    if len(slices) > 1:
        return "packed"
    bound_above = slices[:, HI] < slices[:, K1] - 1 - slices[:, Q0]
    return "causal" if bound_above.any() else "full"


@lru_cache(maxsize=64)
def needs_window(mask: AttnMask) -> bool:
    """Whether a kernel must be able to bound how far back a row attends: some slice's lo binds.

    Where none does, no kernel call of a plan needs it. In a slice j - i is least in the corner
    k0 - (q1 - 1), so lo binds nowhere if lo <= k0 - q1 + 1. What a plan does to slices keeps that:
    clipping raises k0 or lowers q1 (:func:`~..slices.clip`), so the right side only grows; moving
    tokens to buffers shifts both sides equally (:func:`~..slices.shift`); and pieces over the same
    rows that are joined again take lo and k0 from one of them (``rank_plan.joined_keys``).
    """
    slices = mask.slices
    return bool((slices[:, LO] > slices[:, K0] - slices[:, Q1] + 1).any())
