"""One model through both engines: the same loss curve."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ranks import Pool
from shared.llama import LlamaConfig

from on_nnscaler.support import curves

pytestmark = pytest.mark.nnscaler


@pytest.mark.parametrize("policy", ["cp_follow", "cp"])
def test_on_the_cpu(two_ranks: Pool, policy: str) -> None:
    settings = (LlamaConfig(dim=32, layers=2, heads=4, kv_heads=2, hidden=48), 64, 5, torch.float64)
    by_nnscaler, *_ = two_ranks.run(curves.losses, "nnscaler", *settings, policy)
    embedded, *_ = two_ranks.run(curves.losses, "torch", *settings, "cp")
    alone, *_ = two_ranks.run(curves.losses, "alone", *settings, "")
    for curve in (by_nnscaler, embedded):
        torch.testing.assert_close(torch.tensor(curve), torch.tensor(alone), rtol=1e-9, atol=1e-9)


@pytest.fixture(scope="module")
def two_gpus() -> Iterator[Pool]:
    """Two NCCL ranks, one GPU each."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    pool = Pool(2, "nccl", seconds=600)  # autodist times every op
    yield pool
    pool.close()


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["cp_follow", "cp"])
def test_on_two_gpus(two_gpus: Pool, policy: str) -> None:
    """In bf16 the engines may differ by what bf16 itself does to the curve, and no more."""
    config = LlamaConfig(dim=512, layers=4, heads=8, kv_heads=2, hidden=1408)

    def curve(engine: str, dtype: torch.dtype, policy: str) -> torch.Tensor:
        ranks = two_gpus.run(curves.losses, engine, config, 1024, 50, dtype, policy)
        assert ranks[0] == ranks[1]
        return torch.tensor(ranks[0], dtype=torch.float64)

    by_nnscaler = curve("nnscaler", torch.bfloat16, policy)
    embedded = curve("torch", torch.bfloat16, "cp")
    alone, exact = (curve("alone", dtype, "") for dtype in (torch.bfloat16, torch.float32))
    bf16 = (alone - exact).abs().max()
    print(f"\nlast losses: nnscaler {by_nnscaler[-1]:.4f}, embedded {embedded[-1]:.4f}, "
          f"one GPU {alone[-1]:.4f} (fp32 {exact[-1]:.4f}); largest differences: of the engines "
          f"{(by_nnscaler - embedded).abs().max():.4f}, of bf16 to fp32 {bf16:.4f}")  # fmt: skip
    assert exact[-1] < exact[0] - 0.5, "it must have learnt something"
    assert (by_nnscaler - embedded).abs().max() <= 2 * bf16
    assert (by_nnscaler - alone).abs().max() <= 2 * bf16
    assert (embedded - alone).abs().max() <= 2 * bf16
