"""Layers of transformers models that mix tokens without attention: convolutions, the gated delta
rule and Mamba-2's scan.

Their modeling files call functions by a few names. Ours take the place of these functions where
tokens are cut over ranks, and where a graph is captured for an engine to cut; elsewhere
transformers' own run. Documents begin where position ids of the whole sequence restart; in a
captured graph, where ``cu_seq_lens_q`` says so.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ....causal_conv1d import wrap_causal_conv1d_func
from ....linear_attention import wrap_gated_delta_rule_func, wrap_gated_linear_attn_func
from ...core.layout import Layout
from ...op.arguments import ArgumentError
from .batch_mask import documents_of, repeated
from .cut import Cut, running_cut
from .layers_again import carry_cuts, cut_of_layer
from .mask import is_traced
from .mask_function import TITLE

# Names in configs of such layers, and of layers that combine one with attention.
LAYER_TYPES = {"linear_attention", "hybrid"}


@dataclass(frozen=True, eq=False)
class Where:
    """Where the tokens of a layer are.

    Attributes:
        options: ``cu_seqlens``, ``process_group`` and ``layout`` of our functions.
        joined: whether the rows of a batch are taken as one sequence, one after the other, because
            they have documents.
    """

    options: Mapping[str, Any]
    joined: bool

    def tokens(self, *given: Tensor) -> Any:
        """[b, l, ...] in the form that our functions take."""
        return [t.flatten(0, 1).unsqueeze(0) if self.joined else t for t in given]

    def rows(self, out: Tensor, like: Tensor) -> Tensor:
        """The inverse of :meth:`tokens`, for as many rows as ``like`` has."""
        return out.squeeze(0).unflatten(0, like.shape[:2]) if self.joined else out


def convolution(
    cut: Cut | None,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **_: Any,  # documents as others need them, and attention's arguments
) -> Tensor:
    """``causal_conv1d_fn``: [b, d, l] -> [b, d, l]; weight [d, w]."""
    x = hidden_states.transpose(1, 2)
    where = _where(cut, x, cu_seq_lens_q)
    (tokens,) = where.tokens(x.to(weight.dtype))
    y = wrap_causal_conv1d_func(tokens, weight, bias, activation, **where.options)
    return where.rows(y, x).transpose(1, 2).to(x.dtype)


def delta_rule(
    cut: Cut | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """``chunk_gated_delta_rule`` and ``chunk_kda``: out and, if asked for, the final state."""
    _refuse_states(cut, initial_state, output_final_state)
    if use_qk_l2norm_in_kernel:
        query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    where = _where(cut, value, cu_seq_lens_q if cu_seqlens is None else cu_seqlens)
    q, k, v, decay, written = where.tokens(query, key, value, g, beta)
    found: Any = wrap_gated_delta_rule_func(
        q,
        k,
        v,
        decay,
        written,
        initial_state=initial_state,
        output_final_state=output_final_state,
        **where.options,
    )
    out, final = found if output_final_state else (found, None)
    return where.rows(out, value), final


def scan(
    cut: Cut | None,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    cu_seq_lens_q: Tensor | None = None,
    **_: Any,  # includes the chunk size, which changes no result
) -> Any:
    """``mamba_chunk_scan_combined``: x [b, l, h, p], dt [b, l, h], A [h], B and C [b, l, g, n];
    states are [b, h, p, n]."""
    _refuse_states(cut, initial_states, return_final_states)
    if z is not None:
        raise NotImplementedError(f"{TITLE}: a scan that gates its result (z) is not supported")
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    x, where = hidden_states, _where(cut, hidden_states, cu_seq_lens_q)
    wide = torch.float64 if dt.dtype == torch.float64 else torch.float32
    given = C, B, (x * dt.unsqueeze(-1)).to(x.dtype), A.to(wide) * dt.to(wide)
    q, k, v, g = where.tokens(*given)
    found: Any = wrap_gated_linear_attn_func(
        q,
        k,
        v,
        g,
        scale=1.0,
        initial_state=None if initial_states is None else initial_states.mT,
        output_final_state=return_final_states,
        **where.options,
    )
    out, final = found if return_final_states else (found, None)
    out = where.rows(out, x)
    out = out if D is None else out + x * D.unsqueeze(-1).to(x.dtype)
    return out if final is None else (out, final.mT)


def _not_fused(cut: Cut | None, *_: Any, **__: Any) -> None:
    """``mamba_split_conv1d_scan_combined``; None makes a layer call the functions above."""


ROUTED: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolution,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": scan,
    "mamba2_split_conv1d_scan_combined": _not_fused,
}
RECURRENCES = {name for name, ours in ROUTED.items() if ours in (delta_rule, scan)}
_seen: set[str] = set()  # modeling files that were examined


def route() -> None:
    """Replace the functions in all imported modeling files by ours."""
    carry_cuts()
    for name in list(sys.modules):  # other threads may add to it
        if ".modeling_" not in name or name in _seen:
            continue
        _seen.add(name)
        module = sys.modules[name]
        if name.startswith("transformers.models.") and any(hasattr(module, n) for n in RECURRENCES):
            for function in filter(functools.partial(hasattr, module), ROUTED):
                setattr(module, function, _routed(function, getattr(module, function)))


def is_routed(layer: torch.nn.Module) -> bool:
    """Whether the recurrent layers of the model that a layer belongs to call our functions."""
    module = sys.modules[type(layer).__module__]
    return any(hasattr(getattr(module, name, None), "_seqshard") for name in RECURRENCES)


def has_recurrence(layer: torch.nn.Module) -> bool:
    """Whether the model that a layer belongs to has recurrent layers."""
    types = getattr(getattr(layer, "config", None), "layer_types", None) or ()
    return is_routed(layer) and bool(LAYER_TYPES.intersection(types))


def _routed(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        cut = running_cut() if is_traced(first) else cut_of_layer()
        if cut is None and not is_traced(first):
            return original(first, *args, **kwargs)
        return ROUTED[name](cut, first, *args, **kwargs)

    call._seqshard = True  # type: ignore[attr-defined]
    return call


def _refuse_states(cut: Cut | None, initial: Tensor | None, final: bool) -> None:
    if cut is not None and (initial is not None or final):
        raise ArgumentError(
            f"{TITLE}: a recurrent layer with a cache, over tokens that are cut over ranks; pass "
            "use_cache=False"
        )


def _where(cut: Cut | None, x: Tensor, cu_seqlens: Tensor | None) -> Where:
    """Where the tokens of x, [b, l, ...], are."""
    if cut is None:
        return Where({"cu_seqlens": cu_seqlens}, False)
    if cu_seqlens is not None:
        raise ArgumentError(
            f"{TITLE}: cu_seq_lens_q does not go with a rank's part of the tokens; pass "
            "position_ids of the whole sequence, which restart, to sequence_parallel instead"
        )
    rows = x.shape[0]
    if rows not in cut.made:
        cut.made[rows] = _where_cut(cut, rows)
    return cut.made[rows]  # type: ignore[no-any-return]


def _where_cut(cut: Cut, rows: int) -> Where:
    """Where the tokens of a cut are; the same for all layers."""
    if cut.attended is not None and (np.diff(cut.attended.astype(int), axis=-1) > 0).any():
        raise NotImplementedError(
            f"{TITLE}: padding before tokens, which recurrent layers would take up; pad on the "
            "right, or pack"
        )
    documents = documents_of(cut.position_ids, None)
    if documents is None:
        return Where({"process_group": cut.group, "layout": cut.layout}, False)
    total, ends = cut.layout.total, [0]
    for row in np.broadcast_to(documents, (rows, total)):
        ends += (ends[-1] + np.append(np.flatnonzero(np.diff(row)) + 1, total)).tolist()
    layout: Layout = repeated(cut.layout, rows)
    return Where({"cu_seqlens": ends, "process_group": cut.group, "layout": layout}, True)
