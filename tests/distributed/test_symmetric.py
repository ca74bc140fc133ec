"""Two GPUs that write into one another's memory: what they compute is what messages give, in a
CUDA graph too, and they neither wait for the host nor take more memory from step to step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from op_cases import Case
from ranks import Pool

from customized_ops.ring_attention import AttnMask
from tests.distributed import symmetric_jobs as jobs

pytestmark = pytest.mark.gpu

LENGTH = 16384  # from here on keys come in a stage of their own, and causal rows move
# One number of heads and one width, so that libraries compile little.
ALIKE = {"heads": (8, 2), "dims": (128, 128), "dtype": torch.bfloat16, "device": "cuda"}
CASES = {
    "zigzag": Case("ring", LENGTH, layout="zigzag", **ALIKE),
    "rows move": Case("ring", LENGTH, **ALIKE),
    "packed": Case("varlen", LENGTH, cu_seqlens=(0, 1600, 12000, LENGTH), **ALIKE),
    "window": Case("window", LENGTH, window=(2048, -1), **ALIKE),
    "masked": Case("masked", LENGTH, given=AttnMask.prefix_lm(LENGTH, 4096), **ALIKE),
    "scattered": Case("streaming", LENGTH, window=(500, -1), sink_tokens=16, **ALIKE),
    "fused, batch 2": Case("ring", LENGTH // 2, batch=2, fused=True, layout="zigzag", **ALIKE),
}
RIGHT: list[list[str]] = [[], []]  # nothing wrong on either rank


@pytest.fixture(scope="module")
def two_gpus() -> Iterator[Pool]:
    """Two NCCL ranks, one GPU each, that reach each other's memory."""
    if torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("needs two GPUs that reach each other's memory")
    pool = Pool(2, "nccl", seconds=240)  # a rank that compiles lets the other wait
    yield pool
    pool.close()


def test_results_are_those_of_messages(two_gpus: Pool) -> None:
    assert two_gpus.run(jobs.against_messages, CASES) == RIGHT


def test_layers_that_follow_one_another(two_gpus: Pool) -> None:
    assert two_gpus.run(jobs.layer_on_layer, CASES["fused, batch 2"]) == RIGHT


@pytest.mark.parametrize("name", ["zigzag", "rows move"])
def test_a_step_in_a_cuda_graph(two_gpus: Pool, name: str) -> None:
    assert two_gpus.run(jobs.captured, CASES[name]) == RIGHT


def test_no_step_makes_the_host_wait(two_gpus: Pool) -> None:
    cases = {name: CASES[name] for name in ("zigzag", "rows move", "packed", "scattered")}
    assert two_gpus.run(jobs.without_waiting, cases) == RIGHT


@pytest.mark.parametrize("name", ["zigzag", "rows move"])
def test_whoever_is_late(two_gpus: Pool, name: str) -> None:
    assert two_gpus.run(jobs.one_late, CASES[name], 6) == RIGHT


def test_memory_stays_the_same_from_step_to_step(two_gpus: Pool) -> None:
    """However many layers a step has; the second step makes one piece of what the first took."""
    for after in two_gpus.run(jobs.memory_of_steps, CASES["rows move"], (1, 1, 1, 3, 3, 1)):
        _, (_, pieces) = after[1]
        assert len(pieces) == 1 and pieces[0][1] > 0
        assert after[1:] == [after[1]] * 5


def test_plans_share_their_memory(two_gpus: Pool) -> None:
    lengths = (LENGTH // 2, LENGTH // 4, LENGTH)
    for first, *others in two_gpus.run(jobs.memory_of_plans, CASES["zigzag"], lengths, 3):
        _, pieces = others[0][0]
        assert len(pieces) == 1
        assert others == [[others[0][0]] * 3] * 2
        # The first round took what is now one piece.
        assert sum(size for _, size in first[-1][1]) == pieces[0][1]
