"""flash-linear-attention as far as it is called, with its signatures, computed token by token."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from linear_cases import recurrence
from torch import Tensor


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    assert scale is not None and all(t.is_contiguous() for t in (q, k, v, g))
    ends = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    assert cu_seqlens is None or q.shape[0] == 1, "the batch size is expected to be 1"
    sequences = q.shape[0] if cu_seqlens is None else len(ends) - 1
    shape = (len(ends) - 1, q.shape[0], v.shape[2], q.shape[-1], v.shape[-1])
    initial = q.new_zeros(shape)
    if initial_state is not None:
        assert initial_state.shape[0] == sequences
        initial = initial_state.reshape(shape)
    out, final = recurrence(q, k, v, g, beta, initial, ends, scale)
    return out, final.reshape(sequences, *shape[2:]) if output_final_state else None


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    assert cu_seqlens is None or torch.equal(cu_seqlens, cu_seqlens_cpu)
    return _run(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens)


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    safe_gate: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    assert q.shape[2] == v.shape[2], "older versions take as many heads of q as of v"
    return _run(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens)


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    assert g is not None and q.shape[2] == v.shape[2]
    return _run(q, k, v, g, None, scale, initial_state, output_final_state, cu_seqlens)


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: int | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    assert q.shape == k.shape == g.shape and v.shape[:3] == q.shape[:3]
    return _run(q, k, v, g, None, scale, initial_state, output_final_state, cu_seqlens)


FUNCTIONS = {
    "gated_delta_rule": chunk_gated_delta_rule,
    "kda": chunk_kda,
    "simple_gla": chunk_simple_gla,
    "gla": chunk_gla,
}


def modules() -> dict[str, ModuleType]:
    """To put into ``sys.modules``."""
    made = {name: ModuleType(name) for name in ("fla", "fla.ops")}
    for name, function in FUNCTIONS.items():
        module = made[f"fla.ops.{name}"] = ModuleType(f"fla.ops.{name}")
        setattr(module, function.__name__, function)
    assert not made.keys() & sys.modules.keys(), "the library itself is here"
    return made
