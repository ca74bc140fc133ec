"""This package's public ops, called as a model would call them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch.distributed as dist
from torch import Tensor

from benchmark.cases import Case
from customized_ops.ring_attention import (
    Layout,
    Plan,
    make_plan,
    wrap_masked_attn_func,
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
    wrap_sliding_window_attn_func,
    wrap_streaming_attn_func,
    wrap_zigzag_attn_func,
)
from customized_ops.ring_attention.core.cost import CostModel
from customized_ops.ring_attention.core.topology import Topology


@lru_cache(maxsize=64)
def recommended(case: Case, ranks: int, topology: Topology | None = None) -> Layout:
    """The layout to apply once at a model's inputs: zigzag for causal masks, contiguous where rows
    see everything or only their neighbours, and otherwise evenly distributed chunks.
    """
    if case.kind == "causal":
        return Layout.zigzag(case.tokens, ranks)
    if case.kind in ("full", "window", "streaming"):
        return Layout.contiguous(case.tokens, ranks)
    return Layout.balanced(case.mask, ranks, topology=topology)


def plan_of(case: Case, layout: Layout, costs: CostModel) -> Plan:
    """The plan that the op below makes for a case over ranks with this layout."""
    how: dict[str, Any] = {"assignment": "auto", "team_size": None}
    if case.kind in ("window", "streaming"):
        how = {"assignment": "owner"}
    elif is_zigzag(case, layout):
        how = {"assignment": "zigzag"}
    if costs.topology is not None:
        how["team_size"] = None
    return make_plan(
        case.mask, layout, heads=case.heads, head_dim=case.head_dim, costs=costs, **how
    )


def is_zigzag(case: Case, layout: Layout) -> bool:
    """Whether the zigzag op is the one for this case and layout."""
    return case.kind == "causal" and layout == Layout.zigzag(case.tokens, layout.group_size)


class Op:
    """The op for a case.

    Args:
        group: None computes all of it here. rest: options by keyword, the same for all ops.
    """

    def __init__(
        self,
        case: Case,
        layout: Layout,
        group: dist.ProcessGroup | None,
        rest: Mapping[str, Any],
    ) -> None:
        self.case, self.layout, self.zigzag = case, layout, is_zigzag(case, layout)
        self.options, self.rest = rest, {"process_group": group, **rest}
        if group is not None:
            self.rest["layout"] = layout

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out for this rank's tokens, [1, l, heads, d]."""
        case, rest = self.case, self.rest
        if case.kind == "causal":
            function = wrap_zigzag_attn_func if self.zigzag else wrap_ring_attn_func
            return function(q, k, v, causal=True, **rest)
        if case.kind == "full":
            return wrap_ring_attn_func(q, k, v, causal=False, **rest)
        if case.packed:
            own = (t.squeeze(0) for t in (q, k, v))
            bounds = list(case.bounds)
            rest = {"causal": case.causal, **rest}
            return wrap_ring_attn_varlen_func(*own, bounds, bounds, **rest).unsqueeze(0)
        if case.kind == "window":
            window = (case.window, 0)
            return wrap_sliding_window_attn_func(q, k, v, window_size=window, **rest)
        if case.kind == "streaming":
            return wrap_streaming_attn_func(q, k, v, case.window, case.sink_tokens, **rest)
        return wrap_masked_attn_func(q, k, v, case.mask, **rest)
