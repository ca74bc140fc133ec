"""Work as a table, and how it is cut and counted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..arrays import Floats, Ints
from ..mask.intervals import spread, touched
from ..mask.slices import K0, K1, Q0, Q1, Slices, areas, normalise

Work = npt.NDArray[np.int64]  # [n, 7]: a slice, and
TEAM = 6

# Imbalance left alone: moving rows costs messages, and a few percent is below what they cost.
TOLERANCE = 0.02
TILE_ROWS = 128  # where work is cut to suit kernels' tiles


def cut_rows(slices: Slices, tiles: Ints) -> tuple[Ints, Ints, Slices]:
    """``slices`` cut at row ranges.

    Args:
        slices: normalised int64[n, 6]. tiles: int64[m, 2], sorted disjoint row ranges.
    Returns:
        (index of the slice, index of the tile, the part), the parts normalised.
    """
    x, tile = spread(*touched(slices[:, Q0], slices[:, Q1], tiles))
    parts = slices[x]
    parts[:, Q0] = np.maximum(parts[:, Q0], tiles[tile, 0])
    parts[:, Q1] = np.minimum(parts[:, Q1], tiles[tile, 1])
    return x, tile, _tight(parts)


def cut_keys(slices: Slices, tiles: Ints) -> tuple[Ints, Ints, Slices]:
    """As :func:`cut_rows`, at key ranges."""
    x, tile = spread(*touched(slices[:, K0], slices[:, K1], tiles))
    parts = slices[x]
    parts[:, K0] = np.maximum(parts[:, K0], tiles[tile, 0])
    parts[:, K1] = np.minimum(parts[:, K1], tiles[tile, 1])
    return x, tile, _tight(parts)


def _tight(parts: Slices) -> Slices:
    tight = normalise(parts)
    assert len(tight) == len(parts), "every row and every key of a normalised slice has a pair"
    return tight


def with_team(slices: Slices, team: Ints) -> Work:
    return np.concatenate([slices, team[:, None]], axis=1)


def area_per_team(work: Work, teams: int) -> Floats:
    """float64[teams]: pairs that each team computes."""
    area = np.bincount(work[:, TEAM], areas(work[:, :TEAM]), minlength=teams)
    return area.astype(np.float64)


def area_per_cell(slices: Slices, bounds: Ints) -> Floats:
    """float64[m]: pairs whose rows are in each cell, between two of int64[m + 1] bounds."""
    _, cell, parts = cut_rows(slices, np.stack([bounds[:-1], bounds[1:]], axis=1))
    return np.bincount(cell, areas(parts), minlength=len(bounds) - 1).astype(np.float64)
