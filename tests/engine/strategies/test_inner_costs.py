"""What planners are told of a split of attention in which nothing moves, but work is uneven."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from annotations import InnerCost, SplitSite, record_of
from customized_ops.ring_attention import (
    AttnMask,
    wrap_masked_attn_func,
    wrap_ring_attn_func,
    wrap_sliding_window_attn_func,
)


def cost(call: Any, identifier: str, parts: int) -> InnerCost:
    """Of the one op that ``call`` makes on tensors without data."""
    graph = torch.fx.experimental.proxy_tensor.make_fx(call, tracing_mode="fake")(
        torch.zeros(2, 8, 6, 4), torch.zeros(2, 8, 2, 4)
    )
    [node] = [n for n in graph.graph.nodes if record_of(n.target)]
    record = record_of(node.target)
    assert record is not None
    arguments = record.arguments(*torch.fx.node.map_arg((node.args, {}), lambda n: n.meta["val"]))
    bound = next(b for b in record.bindings(arguments) if identifier in b.sizes)
    site = SplitSite(identifier, bound.sizes[identifier], parts, "")
    return record.rule.cost(bound, site, arguments, 4)


def rows(q: torch.Tensor, k: torch.Tensor) -> Any:
    return wrap_ring_attn_func(q, k, k, q_rows=(0, 1))


@pytest.mark.parametrize(
    ("parts", "largest", "mean"),
    [(2, 26, 18), (4, 15, 9), (3, 15, 12), (5, 15, 36 / 5)],  # in pairs
)
def test_rows_of_a_causal_mask(parts: int, largest: int, mean: float) -> None:
    assert cost(rows, "lq", parts) == InnerCost(imbalance=pytest.approx(largest / mean))


def test_rows_of_other_masks() -> None:
    def cross(mask: AttnMask) -> Any:
        return lambda q, k: wrap_masked_attn_func(q, k[:, :7], k[:, :7], mask)

    assert cost(cross(AttnMask.dense(8, 7)), "lq", 4).imbalance == 1.0
    assert cost(cross(AttnMask.dense(8, 7)), "lq", 3).imbalance == pytest.approx(9 / 8)


def test_heads_of_q() -> None:
    def heads(q: torch.Tensor, k: torch.Tensor) -> Any:
        return wrap_ring_attn_func(q, k, k)

    assert [cost(heads, "qh", n) for n in (2, 3)] == [InnerCost()] * 2
    assert cost(heads, "qh", 4) == InnerCost(imbalance=pytest.approx(8 / 6))


@pytest.mark.parametrize(
    ("reduce_dtype", "share"), [(None, 1.0), (torch.float32, 1.0), (torch.bfloat16, 0.75)]
)
def test_gradients_that_travel_in_fewer_bytes(reduce_dtype: Any, share: float) -> None:
    """With a window only keys move: there in 4 bytes an element, and home in 4 or 2."""

    def halo(dtype: Any) -> Any:
        options = {"window_size": (2, 0), "reduce_dtype": dtype}
        return lambda q, k: wrap_sliding_window_attn_func(q, k, k, **options)

    # Of four ranks those in the middle receive both.
    usual, given = (cost(halo(dtype), "l", 4) for dtype in (None, reduce_dtype))
    assert given.forward_bytes == usual.forward_bytes > 0
    assert given.backward_bytes == share * usual.backward_bytes
