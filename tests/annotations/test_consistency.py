"""What ranks compare before they exchange anything."""

from __future__ import annotations

import torch

from annotations.consistency import digest


def test_an_empty_tensor_has_a_digest_whatever_its_strides() -> None:
    """A rank of more ranks than tokens has one, and must compare it like the others."""
    empty = torch.arange(4)[:0]
    strided = torch.as_strided(torch.zeros(1, dtype=torch.int64), (0,), (0,))
    assert strided.stride() == (0,)
    assert digest(strided) == digest(empty) != digest(torch.zeros(1, dtype=torch.int64))
