"""flash-linear-attention as far as it is called, with its signatures, computed token by token."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from library_signature import signature_of, takes
from linear_cases import recurrence
from torch import Tensor

STATES = "scale initial_state output_final_state"
# Modules, their functions and what these take: before the bar what has no default.
FUNCTIONS = {
    "gated_delta_rule": (
        "chunk_gated_delta_rule",
        f"q k v g beta | {STATES} use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel "
        "allow_neg_eigval state_v_first cu_seqlens cu_seqlens_cpu chunk_indices cp_context",
    ),
    "kda": (
        "chunk_kda",
        f"q k v g beta | {STATES} use_qk_l2norm_in_kernel use_gate_in_kernel safe_gate cu_seqlens "
        "cu_seqlens_cpu",
    ),
    "simple_gla": (
        "chunk_simple_gla",
        f"q k v | g g_gamma {STATES} state_v_first cu_seqlens cu_seqlens_cpu",
    ),
    "gla": ("chunk_gla", f"q k v g | {STATES} state_v_first cu_seqlens cu_seqlens_cpu"),
}
GROUPED = "gated_delta_rule"  # the others take as many heads of q as of v, in older versions


def run(a: Any) -> tuple[Tensor, Tensor | None]:
    """What each function computes."""
    q, k, v, g, ends = a.q, a.k, a.v, a.g, a.cu_seqlens
    assert a.scale is not None and all(t.is_contiguous() for t in (q, k, v, g))
    assert g.ndim == 3 or q.shape == k.shape == g.shape
    assert ends is None or q.shape[0] == 1, "the batch size is expected to be 1"
    assert ends is None or torch.equal(ends, a.cu_seqlens_cpu)
    ends = [0, q.shape[1]] if ends is None else ends.tolist()
    shape = (len(ends) - 1, q.shape[0], v.shape[2], q.shape[-1], v.shape[-1])
    sequences = shape[0] * shape[1]
    initial = q.new_zeros(shape)
    if a.initial_state is not None:
        assert a.initial_state.shape[0] == sequences
        initial = a.initial_state.reshape(shape)
    out, final = recurrence(q, k, v, g, getattr(a, "beta", None), initial, ends, a.scale)
    return out, final.reshape(sequences, *shape[2:]) if a.output_final_state else None


def run_each_head(a: Any) -> tuple[Tensor, Tensor | None]:
    """:func:`run`, without groups."""
    assert a.q.shape[2] == a.v.shape[2]
    return run(a)


def modules() -> dict[str, ModuleType]:
    """To put into ``sys.modules``."""
    made = {name: ModuleType(name) for name in ("fla", "fla.ops")}
    for name, (function, arguments) in FUNCTIONS.items():
        module = made[f"fla.ops.{name}"] = ModuleType(f"fla.ops.{name}")
        computed = run if name == GROUPED else run_each_head
        setattr(module, function, takes(signature_of(arguments))(computed))
    assert not made.keys() & sys.modules.keys(), "the library itself is here"
    return made
