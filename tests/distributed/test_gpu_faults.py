"""GPUs that write into one another's memory: where one is somewhere else, the others say so, in
place of wrong numbers or a wait without an end."""

from __future__ import annotations

import re

import gpu_fault_jobs as jobs
import pytest
import torch
from ranks import JobFailed, Pool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]
SECONDS = 60.0  # that a job may take; a rank waits for another for half of that
HERE = r"rank 0 of the group of ranks \[0, 1\] "


def said_after(fault: str, comm: str) -> str:
    """What the first rank says after a fault of the second, in a world of their own."""
    pool = Pool(2, "nccl", SECONDS)
    try:
        with pytest.raises(JobFailed) as failed:
            pool.run(jobs.faulty_call, 1, fault, comm)
        return str(failed.value)
    finally:
        pool.close(patience=0)


DISAGREE = HERE + "and rank 1 do not agree on "
SAYS = {
    "another scale": DISAGREE + "tensors or options",
    "other documents": DISAGREE + "the mask",
    "another op": HERE + "and rank 1 do not ",
    "out of memory": HERE + "cannot go on: rank 1 failed in .*OutOfMemoryError: CUDA out of memory",
    "killed": HERE + "lost rank 1: its process ended",
    "absent": HERE + "has waited 27 s: rank 1 has not come, as long as it may",
}


@pytest.mark.parametrize("fault", SAYS)
def test_a_rank_that_is_somewhere_else(fault: str) -> None:
    said = said_after(fault, "symmetric")
    assert re.search("CUDA error: unspecified launch failure", said), "no number is used"
    assert re.search("wrap_ring_attn_varlen_func, (for|back)ward: " + SAYS[fault], said), said
    assert re.search("PeerFailed: .*" + SAYS[fault], said), said


@pytest.mark.parametrize("fault", ["another scale", "absent"])
def test_the_same_over_messages(fault: str) -> None:
    """NCCL ends its own wait."""
    said = said_after(fault, "nccl")
    text = SAYS[fault] if fault == "another scale" else HERE + "has waited 5 s: rank 1 has not come"
    assert re.search(text, said), said
