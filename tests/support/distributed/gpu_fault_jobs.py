"""Jobs of GPUs that write into one another's memory, of which one is somewhere else; see
``ranks.Pool``. A job ends with a GPU that takes no more work, so its process does nothing else."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from fault_jobs import killed, out_of_memory
from rank_groups import in_their_own_time
from torch import Tensor

from customized_ops.ring_attention import wrap_ring_attn_func, wrap_ring_attn_varlen_func
from customized_ops.ring_attention.core.comm.comm_groups import comm_by_name
from customized_ops.ring_attention.core.comm.patience import PATIENCE
from customized_ops.ring_attention.core.comm.symmetric import CHOICE
from customized_ops.ring_attention.core.kernels import KERNELS

TOKENS, HEADS, DIM = 2048, 8, 64  # of a rank
WARM_UP = 14  # calls, after which passes come from their tapes


def drawn() -> list[Tensor]:
    """q, k and v of packed documents."""
    shape = TOKENS, HEADS, DIM
    return [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for _ in "qkv"]


def forward(leaves: Sequence[Tensor], shift: int = 0, **options: Any) -> Tensor:
    """Attention of two documents."""
    n = TOKENS * dist.get_world_size()
    ends = torch.tensor([0, n // 3 + shift, n], dtype=torch.int32)
    given = {"causal": True, "process_group": dist.group.WORLD} | options
    return wrap_ring_attn_varlen_func(*leaves, ends, ends, **given)


def call(shift: int = 0, **options: Any) -> None:
    """A forward and a backward, waited for."""
    forward(drawn(), shift, **options).sum().backward()
    torch.cuda.synchronize()


def other_op() -> None:
    tensors = [torch.ones(1, TOKENS, HEADS, DIM, device="cuda") for _ in "qkv"]
    wrap_ring_attn_func(*(t.bfloat16() for t in tensors), process_group=dist.group.WORLD)
    torch.cuda.synchronize()


def _runs_out_of_memory() -> None:
    usual = KERNELS["flash4"].forward
    KERNELS["flash4"].forward = lambda *args, **options: out_of_memory()
    try:
        call(softmax_scale=0.11)  # of which there is no tape
    finally:
        KERNELS["flash4"].forward = usual


FAULTS: dict[str, Callable[[], None]] = {
    "another scale": lambda: call(softmax_scale=0.1),
    "other documents": lambda: call(shift=16),
    "another op": other_op,
    "killed": killed,
    "out of memory": _runs_out_of_memory,
    "absent": lambda: time.sleep(600),
}


@in_their_own_time
def faulty_call(faulty: int, fault: str, comm: str) -> None:
    """Calls that are alike, and then one in which a rank is faulty. The others raise what they see
    of it: the error of their device, the warning, and the error of the next call."""
    os.environ |= {PATIENCE: "3", CHOICE: comm}
    for _ in range(WARM_UP):
        call()
    assert comm_by_name(dist.group.WORLD.group_name).writes_to_peers == (comm == "symmetric")
    leaves, said = drawn(), []
    dist.barrier()
    torch.cuda.synchronize()
    started = time.monotonic()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        first = FAULTS[fault] if dist.get_rank() == faulty else call
        for attempt in (first, lambda: forward(leaves)):
            try:
                attempt()
                said.append("nothing")
            except Exception as error:
                seconds = time.monotonic() - started
                said.append(f"after {seconds:.1f} s {type(error).__name__}: {error}")
            time.sleep(1.5)  # the host looks each second
    if dist.get_rank() != faulty:
        raise AssertionError("\n".join(said + [str(w.message) for w in warned]))
