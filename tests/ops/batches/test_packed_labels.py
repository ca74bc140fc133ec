"""Documents of which not all tokens are targets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from customized_ops.ring_attention import packed_batches

from .packed_cases import HEADS


@pytest.mark.parametrize("whole", [False, True])
def test_tokens_that_are_not_learned(whole: bool) -> None:
    """Prompts: their labels are -100, as in datasets. Other documents may have ids alone."""
    documents = [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8], "attention_mask": [1] * 4},
        torch.tensor([1, 2, 3]),
        {"input_ids": np.array([4, 9]), "labels": np.array([-100, -100])},
        {"input_ids": [3, 3], "labels": None},
        {"input_ids": [], "labels": []},
        {"input_ids": torch.tensor([2, 8, 1]), "labels": torch.tensor([2, -100, 1])},
    ]
    given: Any = {"ranks": 2, "heads": HEADS, "whole": whole}
    batches = [next(packed_batches([documents], rank=rank, **given)) for rank in range(2)]
    found = []
    for name in ("tokens", "targets"):
        of_ranks = [getattr(batch, name) for batch in batches]
        all_tokens = of_ranks[0] if whole else batches[0].layout.unshard(of_ranks, dim=0)
        found.append(all_tokens.tolist())
    tokens, targets = found
    assert tokens == [5, 6, 7, 8, 1, 2, 3, 4, 9, 3, 3, 2, 8, 1]
    none = -100
    assert targets == [none, 7, 8, none, 2, 3, none, none, none, 3, none, none, 1, none]
    assert [each.target_count for each in batches] == [6, 6]
