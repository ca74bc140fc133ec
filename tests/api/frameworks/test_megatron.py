"""Megatron-Core's own GPTModel with its sequences over ranks, against its own attention on one. It
runs where megatron-core is installed, which on a CPU is ``pip install --no-deps megatron-core``."""

from __future__ import annotations

import pytest
from ranks import Pool

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import gpt_jobs


@pytest.mark.parametrize(
    ("rows", "bounds"), [(2, [0, 32]), (1, [0, 12, 20, 32])], ids=["rows", "packed"]
)
def test_training_equals_megatrons_attention_on_one_rank(
    two_ranks: Pool, rows: int, bounds: list[int]
) -> None:
    for over_ranks, alone, moved in two_ranks.run(gpt_jobs.far, rows, bounds):
        assert over_ranks < 1e-10 and alone < 1e-10 and moved > 0.01
