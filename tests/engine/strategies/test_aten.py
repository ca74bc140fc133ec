"""Torch's own ops that the engine cuts by annotations of its own: parts add up to the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import aten_jobs
import pytest
import torch
import torch.nn.functional as F
from dense import assert_same
from ranks import Pool
from torch import Tensor
from torch.distributed.tensor import Partial, Shard

from annotations.engines.torch.capture.capture import capture
from annotations.engines.torch.capture.nodes import with_inputs
from annotations.engines.torch.strategies.aten import LOCAL, name_of
from annotations.engines.torch.strategies.one_axis import AxisStrategy, local_strategies

PARTS = 2


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


X, Y = randn(4, 6, 12), randn(4, 6, 8, 9)
ATTENTION = F.scaled_dot_product_attention
QKV = randn(2, 4, 5, 8), randn(2, 4, 7, 8), randn(2, 4, 7, 6)
GROUPS = randn(2, 4, 5, 8), randn(2, 2, 7, 8), randn(2, 2, 7, 8)
CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], dict[str, Any], set[str]]] = {
    "conv1d": (F.conv1d, (X, randn(4, 6, 3)), {"padding": 2}, {"b", "c", "n"}),
    "conv1d, bias": (F.conv1d, (X, randn(4, 6, 3), randn(4)), {"stride": 2}, {"b", "n"}),
    "conv1d, same": (F.conv1d, (X, randn(4, 6, 3)), {"padding": "same"}, {"b", "c", "n"}),
    "conv1d, depthwise": (F.conv1d, (X, randn(6, 1, 4), randn(6)), {"groups": 6}, {"b"}),
    "conv1d, one sequence": (F.conv1d, (X[0], randn(4, 6, 3)), {}, {"c", "n"}),
    "conv2d": (F.conv2d, (Y, randn(4, 6, 3, 2), randn(4)), {"dilation": 2}, {"b", "n"}),
    "conv3d": (F.conv3d, (randn(2, 4, 5, 5, 5), randn(2, 4, 2, 2, 2)), {}, {"b", "c", "n"}),
    "transposed": (F.conv_transpose1d, (X, randn(6, 4, 3)), {"stride": 2}, {"b", "c", "n"}),
    "transposed, groups": (F.conv_transpose1d, (X, randn(6, 2, 3)), {"groups": 2}, {"b"}),
    "attention": (ATTENTION, QKV, {}, {"a0", "a1"}),
    "attention, causal": (ATTENTION, QKV, {"is_causal": True, "scale": 0.3}, {"a0", "a1"}),
    "attention, groups": (ATTENTION, GROUPS, {"enable_gqa": True}, {"a0", "a1"}),
    "attention, mask": (ATTENTION, (*QKV, randn(5, 7)), {}, {"a0", "a1"}),
    "attention, masks": (ATTENTION, (*QKV, randn(2, 1, 5, 7)), {}, {"a0", "a1"}),
    "attention, of heads": (ATTENTION, (*QKV, randn(4, 5, 7)), {}, {"a0", "a1"}),
    "attention, broadcast": (ATTENTION, (QKV[0], *(t[:1] for t in QKV[1:])), {}, set()),
}


class Call(torch.nn.Module):
    def __init__(self, function: Callable[..., Tensor], options: dict[str, Any]) -> None:
        super().__init__()
        self.function, self.options = function, options

    def forward(self, tensors: list[Tensor]) -> Tensor:
        return self.function(*tensors, **self.options)


@pytest.mark.thin(4)
@pytest.mark.parametrize("case", CASES)
def test_parts_make_the_whole(case: str) -> None:
    function, tensors, options, expected = CASES[case]
    graph = capture(Call(function, options), {"tensors": list(tensors)}).graph
    [node] = [n for n in graph.nodes if n.op == "call_function"]
    found = local_strategies(node, PARTS)
    assert name_of(node) in LOCAL and {s.identifier for s in found[1:]} == expected
    whole = [t.clone().requires_grad_() for t in tensors]
    out = function(*whole, **options)
    wanted = torch.autograd.grad(out, whole, dout := torch.cos(out.detach()))
    for strategy in found[1:]:
        parts = [of_part(node, tensors, dout, strategy, rank) for rank in range(PARTS)]
        places = (*strategy.outputs, *strategy.grads)
        named = zip(
            ["out", *"qkvw"], (out, *wanted), places, zip(*parts, strict=True), strict=False
        )
        for name, want, place, each in named:
            assert_same(f"{case}, {strategy.identifier}: {name}", joined(each, place), want)


def of_part(
    node: Any, tensors: tuple[Tensor, ...], dout: Tensor, strategy: AxisStrategy, rank: int
) -> list[Tensor]:
    """The result and gradients of the call on one rank's part, the call as it is."""

    def cut(x: Tensor, place: Any) -> Tensor:
        return x.chunk(PARTS, place.dim)[rank] if isinstance(place, Shard) else x

    own = [
        cut(t, p).clone().requires_grad_() for t, p in zip(tensors, strategy.inputs, strict=True)
    ]
    args, kwargs = with_inputs(node, lambda _, n: own[n])
    out = node.target(*args, **kwargs)
    [place] = strategy.outputs
    return [out, *torch.autograd.grad(out, own, cut(dout, place))]


def joined(parts: tuple[Tensor, ...], place: Any) -> Tensor:
    if isinstance(place, Shard):
        return torch.cat(parts, place.dim)
    return sum(parts[1:], parts[0]) if isinstance(place, Partial) else parts[0]


@pytest.mark.thin(2)
@pytest.mark.parametrize(("policy", "split"), [("cp", "l / 2"), ("dp", "b / 2")])
def test_a_model_with_convolutions(two_ranks: Pool, policy: str, split: str) -> None:
    """Both ways of running; verify=True compares with one process."""
    for plan in two_ranks.run(aten_jobs.convolutions, policy):
        assert split in plan


def test_a_model_with_attention_of_torch(two_ranks: Pool) -> None:
    """Weights in parts of heads: attention has its heads, and nothing is brought together."""
    for plan in two_ranks.run(aten_jobs.attention):
        assert "whole of [2, 8, 16]" not in plan, plan


def test_a_gradient_that_is_zero_but_for_rounding(two_ranks: Pool) -> None:
    """A bias of keys changes no softmax; verify=True does not compare noise with noise."""
    two_ranks.run(aten_jobs.bias_of_keys)
