"""BlockMasks as AttnMasks, pair for pair."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, create_mask

from customized_ops.ring_attention import MaskError
from customized_ops.ring_attention.api.torch_context_parallel.block_mask import mask_of_block_mask

DOCUMENTS = torch.repeat_interleave(torch.arange(4), torch.tensor([33, 7, 60, 20]))


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return (q - k).abs() <= 11


def document(b, h, q, k):
    return DOCUMENTS[q] == DOCUMENTS[k]


def checkers(b, h, q, k):
    return ((q // 3) + (k // 5)) % 2 == 0


def nothing(b, h, q, k):
    return (q + k) < 0


def by_head(b, h, q, k):
    return (q >= k) | (h > 0)


def blocks(mod, q_len: int = 120, k_len: int = 120, block=16, **batch) -> BlockMask:
    sizes = {"B": None, "H": None, "device": "cpu", "BLOCK_SIZE": block, **batch}
    return create_block_mask(mod, Q_LEN=q_len, KV_LEN=k_len, **sizes)


# The arguments of blocks, and the most slices.
CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any], int]] = {
    "causal": ((causal,), {}, 1),
    "window": ((window,), {}, 1),
    "documents": ((and_masks(document, causal),), {}, 4),
    "whole documents": ((document,), {}, 4),
    "checkers": ((checkers,), {}, 1000),
    "nothing": ((nothing,), {}, 0),
    "cross": ((causal, 50, 90), {}, 1),
    "ragged": ((causal, 117, 33), {}, 2),
    "long blocks": ((window,), {"block": (8, 32)}, 1),
    "heads alike": ((window,), {"B": 2, "H": 2}, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_pairs(name: str) -> None:
    args, options, most = CASES[name]
    given = blocks(*args, **options)
    want = create_mask(given.mask_mod, 1, 1, *given.seq_lengths, device="cpu")[0, 0]
    mask = mask_of_block_mask(given)
    assert np.array_equal(mask.to_dense(), want.numpy())
    assert len(mask.slices) <= most
    assert mask_of_block_mask(given) is mask


def test_blocks_say_more_than_the_function() -> None:
    """As FlexAttention has it: blocks that are not listed attend nothing, full ones all."""
    counts, indices = torch.tensor([[[1, 1]]]), torch.tensor([[[[0, 0], [1, 0]]]])
    full_counts, full_indices = torch.tensor([[[0, 1]]]), torch.tensor([[[[0, 0], [0, 0]]]])
    given = BlockMask.from_kv_blocks(
        *(t.int() for t in (counts, indices, full_counts, full_indices)), 4, window
    )
    want = np.zeros((8, 8), dtype=bool)
    want[:4, :4] = want[4:, 4:] = want[4:, :4] = True
    assert np.array_equal(mask_of_block_mask(given).to_dense(), want)
    nowhere = BlockMask.from_kv_blocks(counts.int(), indices.int(), None, None, 4, nothing)
    assert mask_of_block_mask(nowhere).area == 0


def test_refused() -> None:
    with pytest.raises(MaskError, match="batch entry 0, head 1 attends other pairs"):
        mask_of_block_mask(blocks(by_head, H=2))
    with pytest.raises(MaskError, match=r"mask_mod decides 3840 pairs .* at most 1000 are asked"):
        mask_of_block_mask(blocks(causal), most_pairs=1000)
