"""``warm_up`` runs on every rank, for any options; on a CPU it has nothing to compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from customized_ops.ring_attention import compiled_kernels, run_ranks, warm_up

KIND: dict[str, Any] = {"heads": (4, 2), "head_dim": 8, "dtype": torch.float32, "device": "cpu"}
CASES: list[tuple[int, dict[str, Any]]] = [
    (1, {"layout": "contiguous", "v_dim": 4}),
    (2, {"window_size": (9, 0), "return_lse": True}),
    (3, {"causal": False, "softcap": 3.0, "deterministic": True}),
]


@pytest.mark.parametrize(("ranks", "options"), CASES, ids=str)
def test_all_ranks_attend_what_a_training_might(ranks: int, options: dict[str, Any]) -> None:
    made = run_ranks(ranks, lambda comm: warm_up(48, process_group=comm, **KIND, **options))
    assert made == [0] * ranks and compiled_kernels() == 0


def test_what_the_op_refuses() -> None:
    with pytest.raises(ValueError, match="kernel"):
        warm_up(48, **KIND, kernel="flash5")
