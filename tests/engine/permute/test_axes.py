"""Axes of ops along which any order will do: each is tried with a random one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from annotations.engines.torch.capture.nodes import shapes_out
from annotations.engines.torch.permute.token_axes import SequenceDim, along, axes_of
from annotations.engines.torch.strategies.aten import bound_of

aten = torch.ops.aten
INTEGERS = torch.tensor([[2, 0, 1, 1, 0], [1, 1, 2, 0, 2]])

# Calls, and how many axes are to be found.
CALLS: list[tuple[Callable[..., Any], list[tuple[int, ...] | Tensor], int]] = [
    (torch.add, [(2, 3, 4), (3, 1)], 3),
    (torch.where, [INTEGERS > 0, (5,), (2, 1)], 2),
    (lambda x: x.float(), [(3, 4)], 2),
    (lambda x: x.expand(2, 3, 4), [(3, 1)], 3),
    (lambda x: x.repeat(2, 1, 3), [(3, 4)], 2),
    (torch.zeros_like, [(3, 4)], 2),
    (F.silu, [(3, 4)], 2),
    (lambda x, y: x.type_as(y), [(3, 4), (3, 4)], 2),
    (torch.view_as_complex, [(3, 4, 2)], 2),
    (lambda x: F.one_hot(x, 3), [INTEGERS], 2),
    (lambda x: torch.softmax(x, -1), [(2, 3, 4)], 3),
    (lambda x: x.cumsum(1), [(2, 3, 4)], 2),
    (lambda x: x.sort(1), [(2, 3, 4)], 2),
    (lambda x: x[:, 1:], [(2, 3, 4)], 2),
    (lambda x: x.flip([0, 2]), [(2, 3, 4)], 1),
    (lambda x: x.roll(1), [(2, 3)], 0),
    (lambda x: x.roll(1, 1), [(2, 3)], 1),
    (lambda x: x.split([1, 3], 1), [(2, 4, 3)], 2),
    (lambda x: x.chunk(2, -1), [(2, 3, 4)], 2),
    (lambda x, y: torch.cat([x, y], 1), [(2, 3, 4), (2, 5, 4)], 2),
    (lambda x: F.glu(x), [(2, 3, 4)], 2),
    (lambda x: x.repeat_interleave(2, 1), [(2, 3, 4)], 2),
    (lambda x: F.pad(x, (1, 0)), [(2, 3, 4)], 2),
    (lambda x: x.tril(), [(2, 3, 4)], 1),
    (lambda x: F.dropout(x, 0.5, False), [(2, 3)], 2),
    (lambda x: F.layer_norm(x, [4]), [(2, 3, 4)], 2),
    (lambda x, w: F.rms_norm(x, [4], w), [(2, 3, 4), (4,)], 2),
    (lambda x: x.sum((0, 2)), [(2, 3, 4)], 3),
    (lambda x: x.mean(1, True), [(2, 3, 4)], 3),
    (lambda x: x.amax(-1), [(2, 3, 4)], 3),
    (lambda x: x.max(), [(3, 4)], 2),
    (lambda x: x.max(1), [(3, 4)], 1),
    (lambda x: x.argmax(1), [(3, 4)], 1),
    (lambda x: x.permute(2, 0, 1), [(2, 3, 4)], 3),
    (lambda x: x.transpose(0, -1), [(2, 3, 4)], 3),
    (lambda x: x.t(), [(3, 4)], 2),
    (lambda x: x.movedim(0, 1), [(2, 3, 4)], 3),
    (lambda x: x.select(1, 2), [(2, 3, 4)], 2),
    (lambda x: x.unbind(0), [(2, 3, 4)], 2),
    (lambda x, y: torch.stack([x, y], 1), [(3, 4), (3, 4)], 2),
    (F.linear, [(2, 3, 4), (5, 4)], 4),
    (F.linear, [(3, 4), (5, 4), (5,)], 3),
    (torch.mm, [(2, 3), (3, 4)], 3),
    (torch.addmm, [(5,), (3, 4), (4, 5)], 3),
    (torch.addmm, [(3, 1), (3, 4), (4, 5)], 3),
    (torch.bmm, [(2, 3, 4), (2, 4, 5)], 4),
    (torch.matmul, [(2, 1, 3, 4), (6, 4, 5)], 5),
    (lambda x, y: torch.einsum("bic,bjc->bij", x, y), [(2, 3, 4), (2, 5, 4)], 4),
    (lambda w, i: F.embedding(i, w), [(4, 3), INTEGERS], 2),
    (lambda x, i: x.gather(1, i), [(2, 5, 3), INTEGERS[:, :, None].expand(2, 5, 3)], 2),
    (lambda x, i: x.index_select(1, i), [(2, 3, 4), INTEGERS[0]], 3),
    (lambda x, i: x[i], [(3, 4), INTEGERS], 3),
    (lambda x, i: x[:, i], [(2, 3, 4), INTEGERS], 4),
    (F.conv1d, [(2, 3, 4), (3, 3, 3)], 3),
    (F.scaled_dot_product_attention, [(2, 3, 4, 5)] * 3, 2),
    (torch.bernoulli, [(2, 3)], 0),
]


def the_call(function: Callable[..., Any], tensors: list[Tensor]) -> torch.fx.Node:
    """The last op that ``function`` makes, in a graph like a captured one."""

    class Module(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Any:
            return function(*tensors)

    graph = make_fx(Module(), tracing_mode="fake", pre_dispatch=True)(*tensors).graph
    named = [n for n in graph.nodes if n.op == "call_function" and "getitem" not in n.name]
    return named[-1]


def permuted(x: Tensor, place: SequenceDim | None, order: Tensor) -> Tensor:
    return x if place is None else x.index_select(place.dim, order)


@pytest.mark.parametrize("n", range(len(CALLS)))
def test_each_axis_commutes_with_a_permutation(n: int) -> None:
    """And an annotation gives the shapes of results."""
    function, shapes, count = CALLS[n]
    torch.manual_seed(n)
    tensors = [s if isinstance(s, Tensor) else torch.randn(s, dtype=torch.float64) for s in shapes]
    node = the_call(function, tensors)
    axes = axes_of(node)
    assert len(axes) == count, axes
    for axis in axes:
        sizes = {t.shape[at.dim] for t, at in zip(tensors, axis.inputs, strict=True) if at}
        expected = function(*tensors)
        expected = [expected] if isinstance(expected, Tensor) else list(expected)
        if not sizes:  # it comes from nothing: all its positions are alike
            sizes = {expected[0].shape[axis.outputs[0].dim]}
        [size] = sizes
        order = torch.randperm(size)
        inputs = [permuted(t, at, order) for t, at in zip(tensors, axis.inputs, strict=True)]
        results = function(*inputs)
        results = [results] if isinstance(results, Tensor) else list(results)
        for result, whole, at in zip(results, expected, axis.outputs, strict=True):
            torch.testing.assert_close(result, permuted(whole, at, order))
    bound = bound_of(node)
    assert bound is not None or count == 0
    if bound is not None:
        assert list(bound.output_shapes()) == shapes_out(node)


@st.composite
def factored(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes of as many elements, by joining the same factors."""
    factors = draw(st.lists(st.integers(1, 4), min_size=2, max_size=6))
    cuts = [
        sorted(draw(st.sets(st.integers(1, len(factors) - 1), max_size=len(factors) - 1)))
        for _ in range(2)
    ]
    shapes = [
        [math.prod(factors[a:b]) for a, b in zip([0, *c], [*c, len(factors)], strict=True)]
        for c in cuts
    ]
    return shapes[0], shapes[1]


def expanded(place: SequenceDim, order: Tensor) -> Tensor:
    """A permutation of a whole dim."""
    n, inner = len(order), torch.arange(place.inner)
    each = (order[:, None] * place.inner + inner).flatten()
    return (torch.arange(place.outer)[:, None] * n * place.inner + each).flatten()


@settings(max_examples=60, deadline=None)
@given(factored())
def test_views(shapes: tuple[list[int], list[int]]) -> None:
    """A sequence in any dim is found behind a view, or not said to be anywhere; and back."""
    source, target = shapes
    x = torch.arange(math.prod(source)).view(source)
    node = the_call(lambda x: aten.view.default(x, target), [x])
    for dim, length in enumerate(source):
        way = along(node, SequenceDim(dim), length, slot=0)
        if way is None:
            assert source[: dim + 1] != target[: dim + 1]
            continue
        order, place = torch.randperm(length), way.outputs[0]
        assert place is not None
        moved = x.index_select(dim, order).view(target)
        assert torch.equal(moved, x.view(target).index_select(place.dim, expanded(place, order)))
        back = along(node, place, length, index=0)
        assert back is not None and (length == 1 or back.inputs[0] == SequenceDim(dim))
