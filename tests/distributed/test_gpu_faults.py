"""GPUs that write into one another's memory: where one is somewhere else, the others say so, in
place of wrong numbers or a wait without an end."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from unittest import mock

import gpu_fault_jobs as jobs
import pytest
import torch
from fault_jobs import BAD_INPUTS
from ranks import JobFailed, Pool

from customized_ops.ring_attention.core.comm.one_sided.symmetric import CHOICE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]
SaidAfter = Callable[[str, str], str]
SECONDS = 110.0  # that a job may take; a rank waits for another for half of that
HERE = r"rank 0 of the group of ranks \[0, 1\] "
# In the words of CUDA, of flash-attn-4, and of a process whose GPU does not stop for long.
ENDED = r"its GPU goes on \d+ s later, so the process ends"
STOPPED = f"unspecified launch failure|[lL]aunchFailure|LAUNCH_FAILED|{ENDED}"


@pytest.fixture
def said_after(capfd: pytest.CaptureFixture[str]) -> Callable[[str, str], str]:
    return lambda fault, comm: _raised_after(fault, comm) + capfd.readouterr().err


def _raised_after(fault: str, comm: str) -> str:
    """What the first rank raises after a fault of the second, in a world of their own. NCCL, which
    finds the error of the device, too, may end its process first: so errors and warnings count."""
    with mock.patch.dict(os.environ, jobs.ENVIRONMENT | {CHOICE: comm}):
        pool = Pool(2, "nccl", SECONDS)
    try:
        with pytest.raises(JobFailed) as failed:
            pool.run(jobs.faulty_call, 1, fault)
        return str(failed.value)
    finally:
        pool.close(patience=0)


RANK = r"rank \d "
DISAGREE = RANK + r"of the group of ranks \[0, 1\] and " + RANK + "do not "  # whoever finds it
SAYS = {
    "other scores": DISAGREE + "agree on tensors or options",
    "other documents": DISAGREE + "agree on the mask",
    "other shapes": DISAGREE + "agree on tensors or options",
    "more memory": DISAGREE + "agree on the mask or the documents and .*tensors or options",
    "another op": DISAGREE,
    "another length": HERE + "and rank 1 do not make the same calls in the same order: it waits in "
    "wrap_ring_attn_func, where ranks compare how many tokens they hold",
    "out of memory": HERE + "cannot go on: rank 1 failed in .*OutOfMemoryError: CUDA out of memory",
    "killed": HERE + "lost rank 1: its process ended",
    "killed in a backward": HERE + "lost rank 1: its process ended",
    "killed in the first call": HERE + "lost rank 1: its process ended",
    "absent": HERE + r"has waited \d+ s: rank 1 has not come; its group's timeout is near",
}


@pytest.mark.parametrize("fault", SAYS)
def test_a_rank_that_is_somewhere_else(said_after: SaidAfter, fault: str) -> None:
    said = said_after(fault, "symmetric")
    stopped = f"{STOPPED}|AssertionError: after .* s PeerFailed"
    assert re.search(stopped, said), f"no number is used\n{said}"
    assert re.search("wrap_ring_attn_varlen_func, (for|back)ward: .*" + SAYS[fault], said), said
    assert re.search(f"PeerFailed: .*{SAYS[fault]}|{ENDED}", said), said


OVER_MESSAGES = [fault for fault in SAYS if fault not in ("another op", "another length")]


@pytest.mark.parametrize("comm", ["symmetric", "nccl"])
def test_a_late_rank_is_named_and_waited_for(said_after: SaidAfter, comm: str) -> None:
    said = said_after("late", comm)
    assert re.search(HERE + r"has waited \d+ s: rank 1 has not come", said), said
    assert re.search("^AssertionError: nothing\nnothing$", said, re.MULTILINE), said


@pytest.mark.parametrize("fault", OVER_MESSAGES)
def test_the_same_over_messages(said_after: SaidAfter, fault: str) -> None:
    """NCCL's kernels are ended by the host."""
    said = said_after(fault, "nccl")
    assert re.search(SAYS[fault], said), said
    assert not re.search("AssertionError: nothing", said), said


# What changes nothing that other ranks get.
HARMLESS = {"another kernel", "deterministic on one rank", "a sink on one rank"}


@pytest.mark.parametrize("wrong", BAD_INPUTS)
def test_a_wrong_input(said_after: SaidAfter, wrong: str) -> None:
    """It ends the process that passes it, or is found by the other."""
    said = said_after(wrong, "symmetric")
    if wrong in HARMLESS:
        assert re.search("^AssertionError: nothing$", said, re.MULTILINE), said
        return
    lost = HERE + "lost rank 1: its process ended"
    found = f"({DISAGREE}|{lost})"
    assert re.search(STOPPED, said), said
    assert re.search("wrap_ring_attn_func, (for|back)ward: .*" + found, said), said
