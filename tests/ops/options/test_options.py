"""Options that are refused before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refusals
from torch import Tensor

from customized_ops.ring_attention import (
    AttnMask,
    run_ranks,
    wrap_masked_attn_func,
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
    wrap_sliding_window_attn_func,
    wrap_streaming_attn_func,
    wrap_zigzag_attn_func,
)
from customized_ops.ring_attention.core.comm import Comm

Q, PACKED_Q = torch.zeros(2, 8, 4, 16), torch.zeros(8, 4, 16)
OPS: dict[str, Callable[..., Any]] = {
    "wrap_ring_attn_func": lambda **o: wrap_ring_attn_func(Q, Q, Q, **o),
    "wrap_zigzag_attn_func": lambda **o: wrap_zigzag_attn_func(Q, Q, Q, **o),
    "wrap_sliding_window_attn_func": lambda **o: wrap_sliding_window_attn_func(Q, Q, Q, **o),
    "wrap_streaming_attn_func": lambda **o: wrap_streaming_attn_func(Q, Q, Q, 2, 1, **o),
    "wrap_masked_attn_func": lambda **o: wrap_masked_attn_func(
        Q, Q, Q, AttnMask.causal(8 * o["process_group"].size), **o
    ),
    "wrap_ring_attn_varlen_func": lambda **o: wrap_ring_attn_varlen_func(
        *[PACKED_Q] * 3, *[[0, 8 * o["process_group"].size]] * 2, **o
    ),
}
INVALID: list[tuple[dict[str, Any], str]] = [
    ({"softcap": -1.0}, "softcap must be 0 (none) or above, got -1.0"),
    ({"softcap": float("inf")}, "softcap must be 0 (none) or above, got inf"),
    ({"softcap": float("nan")}, "softcap must be 0 (none) or above, got nan"),
    ({"softcap": "2"}, "softcap must be a number, got '2'"),
    ({"softcap": None}, "softcap must be a number, got None"),
    ({"softcap": True}, "softcap must be a number, got True"),
    ({"dropout_p": 1.0}, "dropout_p must be in [0, 1), got 1.0"),
    ({"dropout_p": -0.1}, "dropout_p must be in [0, 1), got -0.1"),
    ({"dropout_p": 512}, "(flash-attn's max_seqlen_q and max_seqlen_k go by name here), got 512"),
    (
        {"window_size": True},
        "(flash-attn's max_seqlen_q and max_seqlen_k go by name here), got True",
    ),
    ({"dropout_p": "half"}, "dropout_p must be a number, got 'half'"),
    ({"dropout_p": None}, "dropout_p must be a number, got None"),
    ({"dropout_p": 0.1, "dropout_seed": 1.5}, "dropout_seed must be an int, an int64 tensor"),
    ({"dropout_p": 0.1, "dropout_seed": True}, "dropout_seed must be an int, an int64 tensor"),
    ({"dropout_p": 0.1, "dropout_seed": torch.tensor([1], dtype=torch.int32)}, "dropout_seed must"),
    ({"dropout_p": 0.1, "dropout_seed": torch.tensor([1, 2])}, "dropout_seed must be an int"),
    ({"dropout_p": 0.1, "dropout_seed": 2**70}, "dropout_seed must"),
    ({"dropout_seed": "x"}, "dropout_seed must be an int, an int64 tensor"),
    ({"dropout_seed": True}, "dropout_seed must be an int, an int64 tensor"),
    ({"dropout_seed": torch.tensor([1, 2])}, "dropout_seed must be an int, an int64 tensor"),
    ({"sink": torch.zeros(3)}, "shape (4,), got (3,)"),
    ({"sink": torch.zeros(1, 4)}, "sink must hold a logit for each of the 4 heads of q"),
    ({"sink": torch.zeros(4, dtype=torch.int64)}, "sink must be a floating tensor [h] or None"),
    ({"sink": 0.5}, "sink must be a floating tensor [h] or None, got 0.5"),
    ({"alibi_slopes": torch.zeros(3)}, "alibi_slopes must be [h] or [b, h] with h = 4 heads"),
    ({"alibi_slopes": torch.zeros(1, 1, 4)}, "alibi_slopes must be [h] or [b, h]"),
    ({"alibi_slopes": torch.zeros(3, 4)}, "alibi_slopes"),
    ({"alibi_slopes": torch.zeros(4, dtype=torch.int32)}, "alibi_slopes must be a floating tensor"),
    ({"alibi_slopes": [0.1] * 4}, "alibi_slopes must be a floating tensor"),
    ({"alibi_slopes": torch.zeros(4, requires_grad=True)}, "pass slopes.detach()"),
    ({"softmax_scale": "x"}, "softmax_scale must be a number or None, got 'x'"),
    ({"softmax_scale": "1"}, "softmax_scale must be a number or None, got '1'"),
    ({"softmax_scale": True}, "softmax_scale must be a number or None, got True"),
    ({"softmax_scale": float("nan")}, "softmax_scale must be finite, got nan"),
    ({"softmax_scale": float("inf")}, "softmax_scale must be finite, got inf"),
    ({"return_lse": "no"}, "return_lse must be True or False, got 'no'"),
    ({"return_lse": None}, "return_lse must be True or False, got None"),
    ({"return_lse": np.array([1, 0])}, "return_lse must be True or False, got array([1, 0])"),
    ({"layout": "zigzag"}, "layout must be a Layout, 'balanced' or None, got 'zigzag'"),
    ({"kernel": "fastest"}, "kernel 'fastest' is unknown"),
    ({"kernel": None}, "kernel must be the name of one, or 'auto', got None"),
    ({"kernel": 3}, "kernel must be the name of one, or 'auto', got 3"),
    (
        {"reduce_dtype": torch.float64},
        "reduce_dtype must be one of None, torch.bfloat16, torch.float16, torch.float32 where q is "
        "torch.float32, got torch.float64",
    ),
    ({"reduce_dtype": torch.float8_e4m3fn}, "reduce_dtype must be one of"),
    ({"reduce_dtype": torch.int16}, "reduce_dtype must be one of"),
    ({"reduce_dtype": "bfloat16"}, "reduce_dtype must be one of"),
    ({"reduce_dtype": 2}, "reduce_dtype must be one of"),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("given", "message"), INVALID, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("op", OPS)
def test_invalid_options_are_refused_before_anything_is_sent(
    op: str, given: dict[str, Any], message: str
) -> None:
    if "window_size" in given and op in ("wrap_streaming_attn_func", "wrap_masked_attn_func"):
        pytest.skip("it has no such argument")

    for ranks in (1, 2):
        for said in refusals(ranks, lambda comm: OPS[op](process_group=comm, **given)):
            assert message in said
            assert said.startswith(op)


@pytest.mark.covering(1)
@pytest.mark.parametrize("given", ["yes", None, 2, np.array([1, 0])], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_deterministic_is_a_switch(op: str, given: Any) -> None:
    message = f"{op}: deterministic must be True or False, got {given!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        run_ranks(1, lambda comm: OPS[op](process_group=comm, deterministic=given))


def test_a_seed_without_dropout_is_not_used() -> None:
    """So ranks may differ in it, and nothing of it stands in the graph."""

    def of_rank(comm: Comm) -> Tensor:
        return wrap_ring_attn_func(Q, Q, Q, process_group=comm, dropout_seed=comm.rank)

    first, second = run_ranks(2, of_rank)
    assert torch.equal(first, second)
