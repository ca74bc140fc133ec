"""The op in a graph: its annotation, its partition rule, its forward and backward.

split on    what moves inside            gradients of weight and bias
b           nothing                      parts to add up
d           nothing                      cut as they are
l           a halo of width - 1 tokens   parts to add up
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from annotations import register_op
from annotations.binding import BoundAnnotation
from annotations.library.define import autograd_on
from annotations.rules import InnerCost, SplitSite

from ..along_sequence.arguments import call_segments
from ..along_sequence.rule import segments_when_cut, sequence_rule
from ..ring_attention.core.comm import Comm
from ..ring_attention.core.comm.comm_groups import comm_by_name
from ..ring_attention.core.comm.transfer_side import Dims, add
from .halo import Halo, halo_of, received_tokens, wanted_tokens
from .kernels import CHOICE, Filter, Request

TITLE = "wrap_causal_conv1d_func"
TOKENS = Dims(tokens=1, heads=2)


def _annotation(x: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None, **_: Any) -> str:
    b = "b" if cu_seqlens is None else "1"
    of_bias = "?" if bias is None else "d"
    return f"{b} l d, d w^, {of_bias}, {'?' if cu_seqlens is None else 'e^'} -> {b} l d"


def _cost(
    bound: BoundAnnotation, site: SplitSite, given: Mapping[str, Any], itemsize: int
) -> InnerCost:
    """The halo; the backward fetches it again and sends its gradient home."""
    b, _, d = given["x"].shape
    segments = segments_when_cut(site, given)
    halo = int(received_tokens(segments, given["weight"].shape[1]).max()) * b * d * itemsize
    largest = max(segments.layout.sizes) * site.parts / max(site.size, 1)
    return InnerCost("halo", halo, 2 * halo, max(largest, 1.0))


def _halo(
    x: Tensor, weight: Tensor, cu_seqlens: Tensor | None, layout: str, comm: Comm
) -> tuple[Halo, bool]:
    """The rank's buffer, and whether any rank of the group lacks tokens."""
    width = weight.shape[1]
    segments = call_segments(TITLE, x.shape[1], cu_seqlens, layout, comm)
    moves = comm.size > 1 and len(wanted_tokens(segments, width)) > 0
    return halo_of(segments, width, comm.rank), moves


def _fetched(x: Tensor, halo: Halo, comm: Comm, moves: bool) -> Tensor:
    if not moves:
        return x[:, :0]
    (fetched,) = comm.fetch(halo.exchange, [x], [TOKENS]).wait()
    return fetched


def _backward(
    dy: Tensor | None, x: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor | None, ...]:
    bias, cu_seqlens, activation, kernel, layout, group, _y = rest
    assert dy is not None, "an op whose results have no gradient is not asked"
    comm = comm_by_name(group)
    with comm.doing(f"{TITLE}, backward"):
        halo, moves = _halo(x, weight, cu_seqlens, layout, comm)
        convolve = CHOICE.choose(TITLE, kernel, Request(x, weight), x).convolve
        given = [x, _fetched(x, halo, comm, moves), weight, *([] if bias is None else [bias])]
        leaves = [t.detach().requires_grad_() for t in given]
        with autograd_on():
            filter_ = Filter(leaves[2], None if bias is None else leaves[3], activation)
            buffer = halo.buffer(leaves[0], leaves[1])
            y = halo.own(convolve(buffer, filter_, halo))
            grads = torch.autograd.grad(y, leaves, dy, materialize_grads=True)
        dx = grads[0].contiguous()
        if moves:
            comm.send_home(halo.exchange, [grads[1]], [dx], [TOKENS], add).wait()
    return dx, grads[2], None if bias is None else grads[3]


@register_op(
    _annotation,
    name="seqshard::causal_conv1d",
    title=TITLE,
    rule=sequence_rule(_cost, None, ("cu_seqlens",)),
    differentiable=("x", "weight", "bias"),
    backward=_backward,
)
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str,
    kernel: str,
    layout: str,
    group: str,
) -> Tensor:
    """The op below :func:`wrap_causal_conv1d_func`, in a graph; ``""`` for no activation."""
    comm = comm_by_name(group)
    with comm.doing(f"{TITLE}, forward"):
        halo, moves = _halo(x, weight, cu_seqlens, layout, comm)
        run = CHOICE.choose(TITLE, kernel, Request(x, weight), x)  # before anything is sent
        buffer = halo.buffer(x, _fetched(x, halo, comm, moves))
        return halo.own(run.convolve(buffer, Filter(weight, bias, activation), halo))
