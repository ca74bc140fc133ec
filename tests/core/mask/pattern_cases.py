"""A mask against its formula."""

import numpy as np
from hypothesis import settings

from customized_ops.ring_attention.core.mask.overlap import first_overlap
from customized_ops.ring_attention.core.mask.slices import normalise

FEW = settings(deadline=None, derandomize=True, max_examples=75)


def ij(q_len, k_len=None):
    return np.indices((q_len, q_len if k_len is None else k_len))


def check(mask, want):
    """The mask is ``want``; no pair twice (the area counts slices), every slice tight."""
    assert (mask.q_len, mask.k_len) == want.shape
    assert (mask.to_dense() == want).all(), f"\n{mask.picture()}\nwanted\n{want.astype(int)}"
    assert mask.area == want.sum()
    assert (normalise(mask.slices) == mask.slices).all()
    assert first_overlap(mask.slices) is None
