"""Small calls of each op, of which the host's work is looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from annotations.registry import OpRecord
from customized_ops.ring_attention import (
    AttnMask,
    wrap_masked_attn_func,
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
    wrap_sliding_window_attn_func,
    wrap_streaming_attn_func,
    wrap_zigzag_attn_func,
)
from customized_ops.ring_attention.op import bound, call, eager

Attend = Callable[..., Any]
OPS: dict[str, Attend] = {
    "ring": wrap_ring_attn_func,
    "zigzag": wrap_zigzag_attn_func,
    "window": partial(wrap_sliding_window_attn_func, window_size=[5, 0]),
    "streaming": partial(wrap_streaming_attn_func, window=4, sink_tokens=2),
    "masked": partial(wrap_masked_attn_func, mask=AttnMask.prefix_lm(16, 5)),
    "packed": partial(wrap_ring_attn_varlen_func, cu_seqlens_q=[0, 5, 16], cu_seqlens_k=[0, 5, 16]),
}


def inputs(tokens: int, packed: bool, heads: int = 4) -> list[Tensor]:
    lead = () if packed else (1,)
    shapes = [(*lead, tokens, h, 8) for h in (heads, 2, 2)]
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def train(attend: Attend, tokens: int, packed: bool = False, **options: Any) -> None:
    out = attend(*inputs(tokens, packed), **options)
    (out[0] if isinstance(out, tuple) else out).sum().backward()


WORK = [
    (eager, "_checked"),
    (call, "make_plan"),
    (bound, "check_name"),
    (call, "choose"),
    (OpRecord, "bind"),
]


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How often each piece of WORK is done inside, by name; by any thread."""
    times = {name: 0 for _, name in WORK}

    def count(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            times[name] += 1
            return function(*args, **kwargs)

        return counting

    with ExitStack() as patches:
        for where, name in WORK:
            patches.enter_context(mock.patch.object(where, name, count(name, getattr(where, name))))
        yield times
