"""Checks of what layouts are made from; each error names the method and its argument."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from ..arrays import Ints
from ..mask import AttnMask, mask_arguments
from .balance import Certificate


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


def integers(values: object, width: int | None = None) -> Ints | None:
    """``values`` as int64[n] or int64[n, width], or None if they are something else."""
    try:
        return mask_arguments.integers("", values, width)
    except mask_arguments.MaskError:
        return None


def cumulative(cu_seqlens: object, total: int) -> Ints:
    """``cu_seqlens`` of :meth:`Layout.zigzag` as an array, checked."""
    name = "cu_seqlens"
    starts = integers(cu_seqlens)
    if starts is None or len(starts) == 0 or (starts[0], starts[-1]) != (0, total):
        raise LayoutError(
            f"Layout.zigzag: {name} must be integers from 0 to total, {total}, "
            f"got {shorten(str(cu_seqlens))}"
        )
    for before in np.flatnonzero(np.diff(starts) < 0).tolist():
        raise LayoutError(
            f"Layout.zigzag: {name}[{before + 1}] = {starts[before + 1]} is below "
            f"{name}[{before}] = {starts[before]}; cumulative lengths never fall"
        )
    return starts


def uneven(certificate: Certificate, chunk: int) -> str:
    """What :meth:`Layout.balanced` says of an assignment that may not be the best."""
    excess = certificate.largest / certificate.mean - 1
    return (
        f"Layout.balanced: the rank with the most work computes {certificate.largest:.6g} pairs, "
        f"{excess:.1%} above the mean of {certificate.mean:.6g}; equal numbers of chunks of "
        f"{chunk} tokens need at least {certificate.least:.6g}. A smaller chunk= evens out better"
    )


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
