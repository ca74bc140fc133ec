"""Jobs in which one rank fails, dies, is late or passes something wrong; see ``ranks.Pool``."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from annotations.waiting import PATIENCE
from customized_ops.causal_conv1d import wrap_causal_conv1d_func
from customized_ops.causal_conv1d.kernels import torch_sums
from customized_ops.linear_attention import wrap_gated_delta_rule_func
from customized_ops.linear_attention.kernels import torch_chunks
from customized_ops.ring_attention import Layout, wrap_ring_attn_func, wrap_ring_attn_varlen_func
from customized_ops.ring_attention.core.comm.patience import LOOK_SECONDS
from customized_ops.ring_attention.core.kernels import KERNELS

LATE_SECONDS = 3.5
HEADS = 4


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def late() -> None:
    time.sleep(LATE_SECONDS)


FAULTS: dict[str, Callable[[], None]] = {
    "killed": killed,
    "out of memory": out_of_memory,
    "late": late,
}
# In which pass of the second call, or in the first, the kernel meets the fault.
MOMENTS = {
    "first call": ("forward", 1),
    "forward": ("forward", 2),
    "backward": ("backward", 2),
}


@contextmanager
def kernel_meets(fault: Callable[[], None], direction: str) -> Iterator[None]:
    """The plain torch kernel meets a fault before its first call."""
    usual, met = getattr(KERNELS["torch"], direction), []

    def meeting(*args: Any, **options: Any) -> Any:
        if not met:
            met.append(fault())
        return usual(*args, **options)

    with mock.patch.object(KERNELS["torch"], direction, meeting):
        yield


def tensors(rank: int, ranks: int, length: int = 24) -> list[Tensor]:
    g = torch.Generator().manual_seed(5)
    layout = Layout.zigzag(length, ranks)
    whole = [torch.randn(1, length, HEADS, 8, generator=g, dtype=torch.float64) for _ in "qkv"]
    return [layout.shard(t, rank).requires_grad_() for t in whole]


def steps(faulty: int, fault: str, moment: str) -> tuple[float, list[str]]:
    """Two forwards and backwards; the kernel of one rank meets a fault.

    Returns:
        seconds that it took; the warnings of this rank.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    q, k, v = tensors(rank, ranks)
    direction, number = MOMENTS[moment]
    started = time.monotonic()
    os.environ[PATIENCE] = str(LOOK_SECONDS)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in (1, 2):
            meets = rank == faulty and step == number
            with kernel_meets(FAULTS[fault], direction) if meets else nullcontext():
                call = wrap_ring_attn_func(
                    q,
                    k,
                    v,
                    causal=True,
                    layout=Layout.zigzag(24, ranks),
                    kernel="torch",
                    process_group=list(range(ranks)),
                )
                call.sum().backward()
    return time.monotonic() - started, [str(w.message) for w in warned]


# Of ops along a sequence: the kernel, its function, and which call of it a rank's fault is in.
ALONG: dict[str, tuple[Any, str, int]] = {
    "wrap_gated_delta_rule_func, forward": (torch_chunks, "forward", 1),
    "wrap_gated_delta_rule_func, backward": (torch_chunks, "backward", 1),
    "wrap_causal_conv1d_func, forward": (torch_sums, "convolve", 1),
    "wrap_causal_conv1d_func, backward": (torch_sums, "convolve", 2),
}


def along_a_sequence(faulty: int, what: str) -> None:
    """A forward and a backward; the kernel of one rank is out of memory, and the rank goes on."""
    ranks = dist.get_world_size()
    kernel, name, number = ALONG[what]
    usual, calls = getattr(kernel, name), []

    def meeting(*args: Any) -> Any:
        calls.append(None)
        if dist.get_rank() == faulty and len(calls) == number:
            out_of_memory()
        return usual(*args)

    x = torch.ones(1, 8, 2, 4, requires_grad=True)
    with mock.patch.object(kernel, name, meeting):
        if what.startswith("wrap_causal"):
            y = wrap_causal_conv1d_func(
                x.flatten(2), torch.ones(8, 3), process_group=[*range(ranks)]
            )
        else:
            y = wrap_gated_delta_rule_func(
                *(x, x, x, -x[..., 0], x[..., 0]), process_group=[*range(ranks)]
            )
        y.sum().backward()


def absent(missing: int) -> list[str]:
    """One rank comes to a call only after the others have lost patience; their warnings."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    os.environ[PATIENCE] = str(LOOK_SECONDS)
    if rank == missing:
        time.sleep(LATE_SECONDS + 2 * LOOK_SECONDS)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        wrap_ring_attn_func(*tensors(rank, ranks), process_group=list(range(ranks)))
    return [str(w.message) for w in warned]


# Number of tokens and options, of one rank and of the others.
ELSEWHERE: dict[str, Sequence[tuple[int, dict[str, Any]]]] = {
    "length": ((12, {}), (24, {})),
    "window": tuple(
        (24, {"layout": Layout.contiguous(24, 2), "causal": False, "window_size": window})
        for window in ((4, 0), (0, 4))
    ),
}


def is_elsewhere(faulty: int, how: str) -> str:
    """One rank's second call is not that of the other, and both wait in it; what it says."""
    rank, group = dist.get_rank(), list(range(dist.get_world_size()))
    with mock.patch.dict(os.environ, {PATIENCE: str(LOOK_SECONDS), "SEQSHARD_CHECK": "0"}):
        for length, options in ((24, {}), ELSEWHERE[how][rank != faulty]):
            given = [t.detach() for t in tensors(rank, 2, length)]
            try:
                wrap_ring_attn_func(*given, kernel="torch", process_group=group, **options)
            except RuntimeError as error:
                return f"{type(error).__name__}: {error}"
    return "no error"


def late_after_passes_alone(late: int) -> str:
    """Passes in which nothing moves are nobody else's; then one rank is late; what a rank says."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ends = torch.arange(ranks + 1, dtype=torch.int32) * 8
    q, k, v = (torch.ones(8, HEADS, 8, dtype=torch.float64) for _ in "qkv")
    given = {"kernel": "torch", "process_group": list(range(ranks))}
    with mock.patch.dict(os.environ, {PATIENCE: str(LOOK_SECONDS), "SEQSHARD_CHECK": "0"}):
        for _ in range(1 + rank):
            wrap_ring_attn_varlen_func(q, k, v, ends, ends, **given)
        if rank == late:
            time.sleep(LATE_SECONDS + 2 * LOOK_SECONDS)
        try:
            wrap_ring_attn_func(q[None], k[None], v[None], **given)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def _changed(**options: Any) -> Callable[..., dict[str, Any]]:
    return lambda **given: given | options


def _of(name: str, change: Callable[[Tensor], Any]) -> Callable[..., dict[str, Any]]:
    return lambda **given: given | {name: change(given[name])}


# What one rank passes otherwise than the others, who pass something right.
BAD_INPUTS: dict[str, Callable[..., dict[str, Any]]] = {
    "q is None": _changed(q=None),
    "k is None": _changed(k=None),
    "v is a list": _changed(v=[1.0]),
    "q in fp32": _of("q", Tensor.float),
    "all of them in fp32": lambda **given: given | {n: given[n].float() for n in "qkv"},
    "integers": lambda **given: given | {n: given[n].long() for n in "qkv"},
    "q of three dims": _of("q", lambda q: q[0]),
    "k of another batch": _of("k", lambda k: torch.cat([k, k])),
    "another batch": lambda **given: given | {n: torch.cat([given[n]] * 2) for n in "qkv"},
    "k with more heads": _of("k", lambda k: torch.cat([k, k[:, :, :1]], 2)),
    "half the heads of k and v": lambda **given: given | {n: given[n][:, :, ::2] for n in "kv"},
    "fewer heads everywhere": lambda **given: given | {n: given[n][:, :, ::2] for n in "qkv"},
    "k of another head dim": _of("k", lambda k: k[..., :4]),
    "v of another head dim": _of("v", lambda v: v[..., :4]),
    "v shorter than k": _of("v", lambda v: v[:, 1:]),
    "a token less": lambda **given: given | {n: given[n][:, 1:] for n in "qkv"},
    "no tokens": lambda **given: given | {n: given[n][:, :0] for n in "qkv"},
    "causal is text": _changed(causal="yes"),
    "not causal": _changed(causal=False),
    "window of one number": _changed(window_size=3),
    "window of three": _changed(window_size=(1, 2, 3)),
    "window below -1": _changed(window_size=(-2, 0)),
    "another window": _changed(window_size=(3, 0)),
    "scale is text": _changed(softmax_scale="x"),
    "scale is infinite": _changed(softmax_scale=float("inf")),
    "another scale": _changed(softmax_scale=0.5),
    "dropout above 1": _changed(dropout_p=1.5),
    "dropout on one rank": _changed(dropout_p=0.1, dropout_seed=3),
    "softcap below 0": _changed(softcap=-1.0),
    "another softcap": _changed(softcap=5.0),
    "a sink on one rank": _changed(sink=torch.zeros(HEADS, dtype=torch.float64)),
    "a sink of another shape": _changed(sink=torch.zeros(HEADS + 1)),
    "slopes on one rank": _changed(alibi_slopes=torch.ones(HEADS)),
    "slopes of another shape": _changed(alibi_slopes=torch.ones(HEADS + 1)),
    "layout is text": _changed(layout="zigzag:24:2"),
    "layout of another total": _changed(layout=Layout.zigzag(48, 2)),
    "layout of other ranks": _changed(layout=Layout.zigzag(24, 3)),
    "another layout": _changed(layout=Layout.contiguous(24, 2)),
    "no layout": _changed(layout=None),
    "kernel is None": _changed(kernel=None),
    "no such kernel": _changed(kernel="nope"),
    "another kernel": _changed(kernel="reference"),
    "deterministic is text": _changed(deterministic="yes"),
    "deterministic on one rank": _changed(deterministic=True),
    "reduce_dtype is integer": _changed(reduce_dtype=torch.int64),
    "another reduce_dtype": _changed(reduce_dtype=torch.float32),
    "team_size 0": _changed(team_size=0),
    "another team_size": _changed(team_size=2),
    "lse on one rank": _changed(return_lse=True),
    "attention probabilities": _changed(return_attn_probs=True),
    "an unknown option": _changed(nonsense=1),
}


def right_arguments() -> dict[str, Any]:
    """Of ``wrap_ring_attn_func``, but for its group; BAD_INPUTS change them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    q, k, v = (t.detach() for t in tensors(rank, ranks))
    layout = Layout.zigzag(24, ranks)
    return {"q": q, "k": k, "v": v, "causal": True, "layout": layout, "kernel": "torch"}


def bad_inputs(wrong: int) -> dict[str, tuple[float, str]]:
    """Seconds and error of a call for each of BAD_INPUTS, which one rank passes."""
    said = {}
    group = list(range(dist.get_world_size()))
    for name, change in BAD_INPUTS.items():
        right = right_arguments()
        started = time.monotonic()
        try:
            wrap_ring_attn_func(
                **(change(**right) if dist.get_rank() == wrong else right), process_group=group
            )
            text = "no error"
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        said[name] = (time.monotonic() - started, text)
    return said
