"""Names, order and defaults of nnscaler 0.9's functions, so that a call means the same here."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from annotations import parallelize
from customized_ops.ring_attention import (
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
    wrap_zigzag_attn_func,
)

REQUIRED = inspect.Parameter.empty

DENSE = {
    "q": REQUIRED,
    "k": REQUIRED,
    "v": REQUIRED,
    "softmax_scale": None,
    "dropout_p": 0.0,
    "causal": True,
    "window_size": (-1, -1),
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
    "process_group": None,
}

VARLEN = {
    "q": REQUIRED,
    "k": REQUIRED,
    "v": REQUIRED,
    "cu_seqlens_q": REQUIRED,
    "cu_seqlens_k": REQUIRED,
    "alibi_slopes": None,
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "deterministic": False,
    "return_attn_probs": False,
    "enable_ring": True,
    "use_cute": False,
    "process_group": None,
    "return_lse": False,
    "max_seqlen_q": None,
    "max_seqlen_k": None,
}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (wrap_ring_attn_func, DENSE),
        (wrap_zigzag_attn_func, DENSE),
        (wrap_ring_attn_varlen_func, VARLEN),
    ],
)
def test_attention(function: Any, expected: dict[str, Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    ours = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    theirs = {p.name: p.default for p in parameters if p.kind is not p.KEYWORD_ONLY}
    assert list(theirs.items()) == list(expected.items())
    assert ours == {"layout": None, "kernel": "auto"}


def test_parallelize() -> None:
    names = list(inspect.signature(parallelize).parameters)
    assert names[:4] == [
        "module_or_module_class",
        "dummy_forward_args",
        "pas_policy",
        "compute_config",
    ]
