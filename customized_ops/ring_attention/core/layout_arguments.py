"""Checks of what layouts are made from; each error names the method and its argument."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from .mask import AttnMask

Ints = npt.NDArray[np.int64]


class LayoutError(ValueError):
    """A layout that cannot be, or one that contradicts what it is used with."""


def shorten(text: str, length: int = 60) -> str:
    """``text``, its end replaced by an ellipsis where it is longer than ``length``."""
    return text if len(text) <= length else text[: length - 3] + "..."


def lengths(maker: str, total: int, group_size: int) -> tuple[int, int]:
    """``total``, 0 or more, and ``group_size``, 1 or more, of the method ``maker``."""
    return (
        whole(f"Layout.{maker}: total", total, 0),
        whole(f"Layout.{maker}: group_size", group_size, 1),
    )


def whole(what: str, value: int, least: int) -> int:
    """``value`` as an int, which must be ``least`` or more; ``what`` names it."""
    if not hasattr(value, "__index__") or operator.index(value) < least:
        raise LayoutError(f"{what} must be an integer of at least {least}, got {value!r}")
    return operator.index(value)


def integers(values: object) -> Ints | None:
    """``values`` as an int64 array, or None if they are not integers."""
    try:
        array = np.asarray(values)
    except ValueError:  # rows of different lengths
        return None
    return array.astype(np.int64) if array.dtype.kind in "iu" or array.size == 0 else None


def cumulative(cu_seqlens: object, total: int) -> Ints:
    """``cu_seqlens`` of :meth:`Layout.zigzag` as an array, checked."""
    starts = integers(cu_seqlens)
    if (
        starts is None
        or starts.ndim != 1
        or len(starts) == 0
        or (starts[0], starts[-1]) != (0, total)
        or (np.diff(starts) < 0).any()
    ):
        raise LayoutError(
            f"Layout.zigzag: cu_seqlens must go from 0 to total, {total}, without falling, "
            f"got {shorten(str(cu_seqlens))}"
        )
    return starts


def weighted_masks(mask: object) -> list[tuple[AttnMask, float]]:
    """``mask`` of :meth:`Layout.balanced` as pairs, checked."""
    pairs: Any = [(mask, 1)] if isinstance(mask, AttnMask) else mask
    try:
        weighted = [(each, float(weight)) for each, weight in pairs]
    except (TypeError, ValueError):
        weighted = []
    if not weighted or not all(isinstance(each, AttnMask) for each, _ in weighted):
        raise LayoutError(
            "Layout.balanced: mask must be an AttnMask or pairs (AttnMask, weight), "
            f"got {shorten(str(mask))}"
        )
    for each, weight in weighted:
        if not 0 < weight < float("inf"):
            raise LayoutError(f"Layout.balanced: weights must be positive, got {weight}")
        if not each.q_len == each.k_len == weighted[0][0].q_len:
            raise LayoutError(
                "Layout.balanced: mask must be of self-attention, masks of one length, got "
                + ", ".join(f"{m.q_len} x {m.k_len}" for m, _ in weighted)
            )
    return weighted
