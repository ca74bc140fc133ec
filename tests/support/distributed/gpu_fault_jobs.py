"""Jobs of GPUs that write into one another's memory, of which one is somewhere else; see
``ranks.Pool``. A job ends with a GPU that takes no more work, so its process does nothing else."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fault_jobs import BAD_INPUTS, killed, out_of_memory, right_arguments
from torch import Tensor

from annotations.waiting import PATIENCE
from customized_ops.ring_attention import wrap_ring_attn_func, wrap_ring_attn_varlen_func
from customized_ops.ring_attention.core.comm.comm_groups import comm_by_name
from customized_ops.ring_attention.core.comm.one_sided.symmetric import CHOICE
from customized_ops.ring_attention.core.kernels import KERNELS

TOKENS, HEADS, DIM = 2048, 8, 64  # of a rank
WARM_UP = 14  # calls, after which passes come from their tapes
PATIENCE_SECONDS = 3.0
# Of a world's processes from their start: what sets a variable while threads of NCCL read others
# may end the process.
ENVIRONMENT = {PATIENCE: str(PATIENCE_SECONDS), "SEQSHARD_CHECK": "0"}


def drawn(dim: int = DIM) -> list[Tensor]:
    """q, k and v of packed documents."""
    shape = TOKENS, HEADS, dim
    return [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for _ in "qkv"]


def forward(leaves: Sequence[Tensor], shift: int = 0, **options: Any) -> Tensor:
    """Attention of two documents."""
    n = TOKENS * dist.get_world_size()
    ends = torch.tensor([0, n // 3 + shift, n], dtype=torch.int32)
    given = {"causal": True, "process_group": dist.group.WORLD} | options
    return wrap_ring_attn_varlen_func(*leaves, ends, ends, **given)


def call(shift: int = 0, dim: int = DIM, **options: Any) -> None:
    """A forward and a backward, waited for."""
    forward(drawn(dim), shift, **options).sum().backward()
    torch.cuda.synchronize()


def other_op(tokens: int = TOKENS) -> None:
    """Of an op without documents."""
    tensors = [torch.ones(1, tokens, HEADS, DIM, device="cuda") for _ in "qkv"]
    wrap_ring_attn_func(*(t.bfloat16() for t in tensors), process_group=dist.group.WORLD)
    torch.cuda.synchronize()


def _without_a_tape() -> None:
    call(softmax_scale=0.11)


def _kernel_meets(fault: Callable[[], None]) -> None:
    with mock.patch.object(KERNELS["flash4"], "forward", lambda *args, **options: fault()):
        _without_a_tape()


def _killed_in_backward() -> None:
    out = forward(drawn())
    out.register_hook(lambda gradient: killed())
    out.sum().backward()


def _late() -> None:
    time.sleep(4 * PATIENCE_SECONDS)  # the host sees a wait of its GPU after seconds
    call()


def ring_call(change: Callable[..., dict[str, Any]] = dict) -> None:
    """As :func:`call`, with few tokens in zigzag order, and arguments as they are changed."""
    given = {name: _on_gpu(value) for name, value in change(**right_arguments()).items()}
    out = wrap_ring_attn_func(**given, process_group=dist.group.WORLD)
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    torch.cuda.synchronize()


def _on_gpu(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    on_gpu = value.cuda()
    if value.dtype == torch.float64:  # which no kernel of GPUs takes
        on_gpu = on_gpu.bfloat16()
    return on_gpu.requires_grad_(value.is_floating_point())


def _as_a_program(step: Callable[[], None]) -> None:
    """An error ends the process."""
    try:
        step()
    except Exception as error:
        print(f"a wrong input: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


FAULTS: dict[str, Callable[[], None]] = {
    "other scores": lambda: call(softmax_scale=0.1),
    "other documents": lambda: call(shift=16),
    "other shapes": lambda: call(dim=DIM // 2),
    "more memory": lambda: call(shift=-(2 * TOKENS // 3), dim=2 * DIM),  # than its peer has
    "another op": other_op,
    "another length": lambda: other_op(TOKENS // 2),
    "killed": killed,
    "killed in a backward": _killed_in_backward,
    "killed in the first call": partial(_kernel_meets, killed),
    "out of memory": partial(_kernel_meets, out_of_memory),
    "late": _late,
    "absent": lambda: time.sleep(600),
}


MET_BY_KERNELS = {"killed in the first call", "out of memory"}


def faulty_call(faulty: int, fault: str) -> None:
    """Calls that are alike, and then one in which a rank is faulty. The others raise what they see
    of it: the error of their device and that of the next call."""
    warnings.simplefilter("always")
    usual, wrong = call, FAULTS.get(fault)
    if wrong is None:
        usual = ring_call
        wrong = partial(_as_a_program, partial(ring_call, BAD_INPUTS[fault]))
    if fault != "killed in the first call":
        other_op()
        for _ in range(WARM_UP):
            usual()
        writes = comm_by_name(dist.group.WORLD.group_name).writes_to_peers
        assert writes == (os.environ[CHOICE] == "symmetric")
    right = _without_a_tape if fault in MET_BY_KERNELS else usual
    leaves, said = drawn(), []
    dist.barrier()
    torch.cuda.synchronize()
    time.sleep(0.5)  # a process whose peer ends at once may still be in that
    started = time.monotonic()
    for attempt in (wrong if dist.get_rank() == faulty else right, lambda: forward(leaves)):
        try:
            attempt()
            said.append("nothing")
        except Exception as error:
            seconds = time.monotonic() - started
            said.append(f"after {seconds:.1f} s {type(error).__name__}: {error}")
        time.sleep(1.5)  # the host looks each second
    if dist.get_rank() != faulty:
        raise AssertionError("\n".join(said))
