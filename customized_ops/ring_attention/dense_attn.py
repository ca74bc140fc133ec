"""The ops over one whole sequence a batch element; ring and zigzag differ in who computes a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from annotations import AnnotatedOp, register_op
from annotations.binding import BoundAnnotation
from annotations.rules import SplitSite

from .arguments import (
    causal_of,
    check_tensors,
    checked,
    refuse_unsupported,
    scale_of,
    spec_of,
    window_bounds,
)
from .attention_op import (
    Call,
    Options,
    backward,
    forward,
    head_dims,
    layout_of,
    lse_like,
    resolve,
    sequence_rule,
)
from .core.comm import Comm
from .core.groups import GroupLike, group_name
from .core.layout import Layout
from .core.mask import AttnMask
from .core.plan import Plan, make_plan


def dense_attention(
    op: AnnotatedOp,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    process_group: GroupLike,
    layout: Layout | None,
    kernel: str,
    **unsupported: object,
) -> Tensor:
    """Check a user's call of a dense attention op and make it; returns out."""
    record = op.record

    def check() -> tuple[Any, ...]:
        refuse_unsupported(record.title, **unsupported)
        if not torch.compiler.is_compiling():
            check_tensors(record.title, q, k, v)
            record.bind({"q": q, "k": k, "v": v})
        scale = scale_of(record.title, softmax_scale, q)
        window = window_bounds(record.title, window_size)
        return (
            scale,
            causal_of(record.title, causal),
            *window,
            kernel,
            spec_of(record.title, layout),
        )

    rest = checked(record.title, process_group, check)
    out, _ = op(q, k, v, *rest, group_name(process_group))
    return out


def dense_op(name: str, title: str, assignment: str) -> AnnotatedOp:
    """Declare an op over one whole sequence a batch element: q, k, v [b, l, heads, d].

    Args:
        assignment: who computes which row; see :func:`~.core.plan.make_plan`.
    """

    def annotation(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> str:
        if q.ndim != 4 or k.ndim != 4:
            return "b l h hd^, b l h hd^, b l h vd^ -> b l h vd^, b h l"
        h, g = head_dims(title, q, k)
        return f"b l {h} hd^, b l {g} hd^, b l {g} vd^ -> b l {h} vd^, b {h} l"

    def plan(layout: Layout, causal: bool, window: tuple[int, int]) -> Plan:
        mask = AttnMask.dense(layout.total, causal=causal, window=window)
        return make_plan(mask, layout, assignment=assignment)

    def resolved(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float,
        causal: bool,
        window_left: int,
        window_right: int,
        kernel: str,
        layout: str,
        group: str,
        *,
        compare: bool,
    ) -> Call:
        def make(comm: Comm) -> Plan:
            where = layout_of(title, comm, layout, q.shape[1], None)
            return plan(where, causal, (window_left, window_right))

        options = Options(softmax_scale, kernel, group)
        return resolve(title, q, k, v, make, options, compare=compare)

    def run_backward(dout: Any, dlse: Any, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        *inputs, out, lse = rest
        q, k, v = inputs[:3]
        return backward(resolved(*inputs, compare=False), dout, dlse, q, k, v, out, lse)

    def fake(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        check_tensors(title, q, k, v)
        b, length, h, _d = q.shape
        return q.new_empty((b, length, h, v.shape[-1])), lse_like(q, (b, h, length))

    def plan_of(bound: BoundAnnotation, site: SplitSite, given: Mapping[str, Any]) -> Plan:
        window = given["window_left"], given["window_right"]
        return plan(Layout.contiguous(site.size, site.parts), given["causal"], window)

    @register_op(
        annotation,
        name=name,
        title=title,
        rule=sequence_rule(plan_of),
        fake=fake,
        backward=run_backward,
    )
    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float,
        causal: bool,
        window_left: int,
        window_right: int,
        kernel: str,
        layout: str,
        group: str,
    ) -> tuple[Tensor, Tensor]:
        rest = softmax_scale, causal, window_left, window_right, kernel, layout, group
        return forward(resolved(q, k, v, *rest, compare=True), q, k, v)

    return attend
