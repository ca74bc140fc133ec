"""What tests of balance measure."""

import numpy as np

from customized_ops.ring_attention.core.plan.bounds import row_sums


def cuts_of(total: int, chunk: int) -> np.ndarray:
    return np.minimum(np.arange(-(-total // chunk) + 1) * chunk, total)


def pairs_before(mask, rows):
    """Attended pairs whose query index is below each of ``rows``."""
    return np.concatenate([[0], np.cumsum(row_sums(mask.slices, mask.q_len))])[rows]


def imbalance(areas, rank_of, group_size):
    """The largest rank's area over the mean; 1.0 when there is nothing to do."""
    loads = np.bincount(rank_of, weights=areas, minlength=group_size)
    return float(loads.max() * group_size / loads.sum()) if loads.any() else 1.0


def assert_even_counts(rank_of, group_size):
    counts = np.bincount(rank_of, minlength=group_size)
    assert len(counts) == group_size, "a rank that is not there"
    assert counts.max() - counts.min() <= 1
