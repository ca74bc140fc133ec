"""Every public op is registered, and passes torch's opcheck."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from annotations.registry import registered_ops
from customized_ops.ring_attention import AttnMask
from customized_ops.ring_attention.op.tokens.sequence_order import DOCUMENT_ORDER, TO_ORDER

# Losses have tests of their own; whether they are registered depends on what other tests import.
TESTED_ELSEWHERE = "cross_entropy", "dropout", "gated_", "causal_conv1d"
OPS = {
    n: r
    for n, r in registered_ops().items()
    if n.startswith("seqshard::") and not any(x in n for x in TESTED_ELSEWHERE)
}
NOT_ATTENTION = {
    "seqshard::move_tokens": [
        ("zigzag:10:1", "sizes:10", 3, 0, ""),
        ("striped", "striped", -1, 1, ""),
        ("whole", "zigzag:10:1:0,4,10", 0, 1, ""),
        ("striped:10:1:1", "whole", 0, 0, ""),
    ],
    "seqshard::shuffle_documents": [(torch.tensor([0, 4, 10]), False, "")],
}
DATA = {
    "cu_seqlens_q": torch.tensor([0, 4, 10]),
    "cu_seqlens_k": torch.tensor([0, 4, 10]),
    "mask_slices": torch.from_numpy(AttnMask.prefix_lm(10, 3).slices.copy()),
    "causal": True,
    "window_left": 4,
    "window_right": -1,
    "sink_tokens": 1,
    "max_seqlen_q": -1,
    "max_seqlen_k": 6,
    "q_len": 10,
    "k_len": 10,
    "softmax_scale": 0.3,
    "return_lse": True,
    "deterministic": True,
    "reduce_dtype": "float32",
    "kernel": "auto",
    "layout": "",
    "k_layout": "",
    "team_size": 0,
    "row_part": 0,
    "row_parts": 0,
    "head_part": 0,
    "head_parts": 0,
    "head_total": 0,
    "group": "",
}
PLAIN = {"alibi_slopes": None, "sink": None, "dropout_seed": None, "softcap": 0.0, "dropout_p": 0.0}


def scored() -> dict[str, Any]:
    """Everything that can be done to scores."""
    return {
        "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4]),
        "sink": torch.tensor([0.5, -0.5, 1.0, 0.0], dtype=torch.float64, requires_grad=True),
        "dropout_seed": torch.tensor([7]),
        "softcap": 2.0,
        "dropout_p": 0.25,
    }


def samples(name: str) -> list[tuple[Any, ...]]:
    """Arguments of calls of a registered op; KeyError for one with an argument not known here."""
    torch.manual_seed(0)
    if name == DOCUMENT_ORDER:
        ends = torch.tensor([0, 7, 10])
        return [(ends, "balanced by document:2", 10, 2, 3, back, "cpu") for back in (False, True)]
    if name == TO_ORDER:
        x, ends = torch.randn(2, 10, 3, requires_grad=True), torch.tensor([0, 7, 10])
        fixed = x, None, "ranges:0-2,8-10,2-8", 1, False
        return [fixed, (x, ends, "balanced by document:2", 1, True)]
    if name in NOT_ATTENTION:
        x = torch.randn(10, 10, 3, dtype=torch.float64, requires_grad=True)
        return [(x, *rest) for rest in NOT_ATTENTION[name]]
    known = list(OPS[name].signature.parameters)
    shape = (10, 4, 8) if "cu_seqlens_q" in known else (2, 10, 4, 8)
    q = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    k, v = (q.detach()[..., :2, :].clone().requires_grad_() for _ in range(2))
    given = {"q": q, "k": k, "v": v, **DATA}
    part = q.detach()[..., 5:, 2:, :].clone().requires_grad_()
    parts = {"row_part": 1, "row_parts": 2, "head_part": 1, "head_parts": 2, "head_total": 4}
    ways = (PLAIN, scored(), {**PLAIN, **parts, "q": part})
    return [tuple({**given, **how}[n] for n in known) for how in ways]


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", OPS)
def test_opcheck(name: str) -> None:
    """Schema, fake and autograd registration as torch's own checker sees them."""
    for args in samples(name):
        torch.library.opcheck(OPS[name].forward, args)


def test_every_public_op_is_registered() -> None:
    attention = {
        "masked_attn",
        "ring_attn",
        "ring_attn_varlen",
        "sliding_window_attn",
        "sliding_window_attn_varlen",
        "streaming_attn",
        "streaming_attn_varlen",
        "zigzag_allgather_attn_varlen",
        "zigzag_attn",
    }
    others = {"move_tokens", "shuffle_documents", "document_order", "to_order"}
    assert {n.split("::")[1] for n in OPS} == attention | others
