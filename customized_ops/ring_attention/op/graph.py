"""The graph door: an attention op of ``torch.library``, whose arguments are tensors, numbers, text.

    AttentionCall --encode--> seqshard::ring_attn(q, k, v, ..., layout, group) --decode--> Bound

All ops have the same arguments but for those of their mask source: q, k, v, integer tensors
(cu_seqlens, a mask), alibi_slopes, sink, dropout_seed, numbers (causal, window), and the options.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from annotations import register_op

from ..core.comm.comm_groups import comm_by_name
from .arguments import check_tensors
from .bind import bind
from .bound import lse_like
from .call import AttentionOp
from .mask_source import MaskSource
from .options import OPTIONAL_TENSORS
from .rule import annotation, rule_of


def declare(
    source: type[MaskSource],
    name: str,
    title: str,
    *,
    assignment: str = "auto",
    split_heads: bool = True,
) -> AttentionOp:
    """Register an attention op; the arguments are :class:`~.call.AttentionOp`'s."""
    op = AttentionOp(name, title, source, assignment, split_heads)

    def attend(**given: Any) -> tuple[Tensor, Tensor]:
        comm = comm_by_name(given["group"])
        bound = bind(op, given, comm, compare=True)
        optional = [given[name] for name in OPTIONAL_TENSORS]
        return bound.forward(comm, given["q"], given["k"], given["v"], optional)

    def backward(dout: Any, dlse: Any, *args: Any) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = args
        given = dict(zip(op.arguments, inputs, strict=True))
        comm = comm_by_name(given["group"])
        bound = bind(op, given, comm, compare=False)
        optional = [given[name] for name in OPTIONAL_TENSORS]
        q, k, v = (given[name] for name in "qkv")
        return bound.backward(comm, (dout, dlse), q, k, v, optional, out, lse)

    def fake(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        check_tensors(title, q, k, v)
        *lead, length, h, _d = q.shape
        return q.new_empty((*lead, length, h, v.shape[-1])), lse_like(q, (*lead, h, length))

    by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
    attend.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, by_position, annotation=t) for n, t in op.arguments.items()],
        return_annotation=tuple[Tensor, Tensor],
    )
    attend.__name__ = name.split("::")[1]
    attend.__doc__ = f"The op below :func:`{title}`, as it stands in a graph."
    register_op(
        lambda **given: annotation(op, given),
        name=name,
        title=title,
        rule=rule_of(op),
        differentiable=("q", "k", "v", "sink"),
        fake=fake,
        backward=backward,
    )(attend)
    assert op.record is not None and op.backward is not None  # found now, not while compiling
    return op
