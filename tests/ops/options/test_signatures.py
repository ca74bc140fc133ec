"""Names, order and defaults of nnscaler 0.9's functions, so that a call means the same here."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from annotations import parallelize
from customized_ops.ring_attention import (
    wrap_masked_attn_func,
    wrap_maybe_shuffle,
    wrap_maybe_unshuffle,
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
    wrap_sliding_window_attn_func,
    wrap_streaming_attn_func,
    wrap_zigzag_allgather_attn_varlen_func,
    wrap_zigzag_attn_func,
)
from customized_ops.ring_attention.varlen_utils import shuffle_varlen, unshuffle_varlen

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

# There cu_seqlens and alibi_slopes have no defaults; here a call without documents is one sequence.
SLIDING_WINDOW = VARLEN | {"cu_seqlens_q": None, "cu_seqlens_k": None, "causal": True}

SHUFFLE = {
    "hidden_states": REQUIRED,
    "cu_seqlens": REQUIRED,
    "enable_ring": True,
    "process_group": None,
}

SHUFFLE_VARLEN = dict.fromkeys(["t", "cu_seqlens_padded", "cp_ranks", "cp_group"], REQUIRED)

# Of every attention op, keyword only.
OURS = {
    "softcap": 0.0,
    "sink": None,
    "dropout_seed": None,
    "layout": None,
    "kernel": "auto",
    "reduce_dtype": None,
    "q_rows": None,
    "q_heads": None,
}


def parameters(function: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Names and defaults of those that may be positional, and of those that are keyword only."""
    both: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for p in inspect.signature(function).parameters.values():
        both[p.kind is p.KEYWORD_ONLY][p.name] = p.default
    return both


@pytest.mark.parametrize(
    ("function", "theirs", "ours"),
    [
        (wrap_ring_attn_func, DENSE, OURS | {"return_lse": False, "team_size": None}),
        (wrap_zigzag_attn_func, DENSE, OURS | {"return_lse": False}),
        (wrap_ring_attn_varlen_func, VARLEN, OURS | {"k_layout": None, "team_size": None}),
        (wrap_sliding_window_attn_func, SLIDING_WINDOW, OURS),
        (wrap_zigzag_allgather_attn_varlen_func, VARLEN, OURS),
        (wrap_maybe_shuffle, SHUFFLE, {}),
        (wrap_maybe_unshuffle, SHUFFLE, {}),
        (shuffle_varlen, SHUFFLE_VARLEN, {}),
        (unshuffle_varlen, SHUFFLE_VARLEN, {}),
    ],
)
def test_calls_mean_the_same(function: Any, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    positional, keyword = parameters(function)
    assert list(positional.items()) == list(theirs.items())
    assert keyword == ours


@pytest.mark.parametrize("function", [wrap_masked_attn_func, wrap_streaming_attn_func])
def test_attention_ops_of_our_own_have_the_same_options(function: Any) -> None:
    positional, keyword = parameters(function)
    shared = ["process_group", "softmax_scale", "dropout_p", "alibi_slopes", "deterministic"]
    assert {name: positional[name] for name in shared} == {name: DENSE[name] for name in shared}
    assert OURS.items() <= keyword.items()
    assert keyword["return_lse"] is False


def test_parallelize() -> None:
    names = list(inspect.signature(parallelize).parameters)
    assert names[:4] == [
        "module_or_module_class",
        "dummy_forward_args",
        "pas_policy",
        "compute_config",
    ]
