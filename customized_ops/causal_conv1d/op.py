"""The op in a graph: its annotation, its partition rule, its forward and backward.

split on    what moves inside            gradients of weight and bias
b           nothing                      parts to add up
d           nothing                      cut as they are
l           a halo of width - 1 tokens   parts to add up
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from annotations import register_op
from annotations.binding import BoundAnnotation
from annotations.library.define import autograd_on
from annotations.rules import InnerCost, SplitSite

from ..along_sequence import Segments
from ..along_sequence.arguments import call_segments
from ..along_sequence.rule import segments_when_cut, sequence_rule
from ..ring_attention.core.comm import Comm
from ..ring_attention.core.comm.comm_groups import comm_by_name
from ..ring_attention.core.comm.transfer_side import Dims, add
from ..ring_attention.core.plan.exchanges.exchange import Exchange
from .halo import Halo, exchange_of, halo_of, received_tokens, wanted_tokens
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


class Moves(NamedTuple):
    """What a pass moves between ranks.

    Attributes:
        any: whether a rank of the group lacks tokens.
    """

    segments: Segments
    width: int
    comm: Comm
    any: bool

    @classmethod
    def of(
        cls, x: Tensor, weight: Tensor, cu_seqlens: Tensor | None, layout: str, comm: Comm
    ) -> Moves:
        """The moves of a call."""
        width = weight.shape[1]
        segments = call_segments(TITLE, x.shape[1], cu_seqlens, layout, comm)
        moves = comm.size > 1 and len(wanted_tokens(segments, width)) > 0
        return cls(segments, width, comm, moves)

    @property
    def halo(self) -> Halo:
        """The rank's buffer."""
        return halo_of(self.segments, self.width, self.comm.rank)

    def seen_by(self, rank: int) -> Exchange:
        """What a rank fetches."""
        return exchange_of(self.segments, self.width, rank)

    def begin(self, x: Tensor, what: str) -> Tensor:
        """The tokens that the rank lacks, [b, n, d]; valid until :meth:`end`."""
        if not self.any:
            return x[:, :0]
        same = x.shape[:1], x.shape[2:], x.dtype, self.width
        self.comm.begin(self.segments.fingerprint(TITLE, what, *same))
        own = self.seen_by(self.comm.rank)
        (fetched,) = self.comm.fetch(own, [x], [TOKENS], self.seen_by).wait()
        return fetched  # type: ignore[no-any-return]

    def send_home(self, gradient: Tensor, dx: Tensor) -> None:
        """Add the gradients of what was fetched to those of their owners."""
        if self.any:
            own = self.seen_by(self.comm.rank)
            given = own, [gradient], [dx], [TOKENS], add
            self.comm.send_home(*given, seen_by=self.seen_by).wait()

    def end(self) -> None:
        """Declare that the fetched tokens are no longer used."""
        if self.any:
            self.comm.end()
            self.comm.leave()


def _backward(
    dy: Tensor | None, x: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor | None, ...]:
    bias, cu_seqlens, activation, kernel, layout, group, _y = rest
    assert dy is not None, "an op whose results have no gradient is not asked"
    comm = comm_by_name(group)
    with comm.doing(f"{TITLE}, backward"):
        moves = Moves.of(x, weight, cu_seqlens, layout, comm)
        convolve, halo = CHOICE.choose(TITLE, kernel, Request(x, weight), x).convolve, moves.halo
        given = [x, moves.begin(x, "backward"), weight, *([] if bias is None else [bias])]
        leaves = [t.detach().requires_grad_() for t in given]
        with autograd_on():
            filter_ = Filter(leaves[2], None if bias is None else leaves[3], activation)
            buffer = halo.buffer(leaves[0], leaves[1])
            y = halo.own(convolve(buffer, filter_, halo))
            grads = torch.autograd.grad(y, leaves, dy, materialize_grads=True)
        dx = grads[0].contiguous()
        moves.send_home(grads[1], dx)
        moves.end()
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
        moves = Moves.of(x, weight, cu_seqlens, layout, comm)
        run = CHOICE.choose(TITLE, kernel, Request(x, weight), x)  # before anything is sent
        buffer = moves.halo.buffer(x, moves.begin(x, "forward"))
        moves.end()
        return moves.halo.own(run.convolve(buffer, Filter(weight, bias, activation), moves.halo))
