"""How an attention op is declared, and how a user's call of it is checked and made.

wrap_*_attn_func            checks what the user passed, names the group
  -> seqshard::*_attn       the op in a graph: tensors, numbers, strings      declared here
       attention_family     its arguments, and how they say which pairs attend
       attention_rule       its annotation and partition rule
    -> attention_call       the op call becomes a plan, which is run

All ops have the same arguments but for those that say which pairs attend: q, k, v, integer tensors
(cu_seqlens, a mask), alibi_slopes, sink, dropout_seed, numbers (causal, window), and the options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from annotations import AnnotatedOp, register_op
from annotations.binding import BoundAnnotation
from annotations.rules import SplitSite

from .arguments import (
    ArgumentError,
    Options,
    check_tensors,
    checked,
    dropout_of,
    refuse_unsupported,
)
from .attention_call import backward, forward, lse_like, resolve
from .attention_family import OPTIONAL_TENSORS, OPTIONS, Family, Given, Problem
from .attention_rule import annotation, rule_of, sizes
from .core.comm import Comm
from .core.groups import GroupLike, group_name
from .core.inprocess import InProcessComm
from .core.layout import Layout
from .core.plan import Plan, make_plan
from .parts import KeyHeads, part_numbers, refuse_with_parts, rows_of


def declare(
    family: Family, name: str, title: str, *, assignment: str = "auto", split_heads: bool = True
) -> AnnotatedOp:
    """Register an attention op.

    Args:
        name: ``namespace::op``. title: the public function's name, for errors.
        assignment: who computes what; see :func:`~.core.plan.make_plan`.
        split_heads: whether the op may split heads over ranks inside, where that is faster.
    """
    arguments = family.arguments

    def plan(problem: Problem, heads: tuple[int, int]) -> Plan:
        return make_plan(
            problem.mask,
            problem.q_layout,
            problem.k_layout,
            assignment=assignment,
            heads=heads if heads[1] else (1, 1),
            team_size=None if split_heads else 1,
        )

    def resolved(given: Given, compare: bool) -> Any:
        def make(comm: Comm) -> tuple[Plan, Any]:
            refuse_with_parts(title, given, comm.size)
            part_of_rows = given["row_parts"] > 0
            rows = family.all_rows(given) if part_of_rows else given["q"].shape[-3]
            problem = family.problem(title, given, rows, comm)
            if part_of_rows:
                problem = rows_of(title, problem, given)
            heads = given["q"].shape[-2], given["k"].shape[-2]
            return plan(problem, heads), problem.key_positions

        return resolve(title, given, make, compare=compare)

    def of_own_heads(given: dict[str, Any]) -> tuple[dict[str, Any], KeyHeads | None]:
        own = KeyHeads.of_call(title, given)
        return (given | {name: own.of(given[name]) for name in "kv"} if own else given), own

    def attend(**given: Any) -> tuple[Tensor, Tensor]:
        given, _ = of_own_heads(given)
        return forward(resolved(given, True), given, family.packed)

    def run_backward(dout: Any, dlse: Any, *args: Any) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = args
        whole = dict(zip(arguments, inputs, strict=True))
        given, own = of_own_heads(whole)
        grads = backward(resolved(given, False), dout, dlse, given, out, lse, family.packed)
        if own is None:
            return grads
        dq, dk, dv, dsink = grads
        assert dk is not None and dv is not None
        return dq, own.spread(dk, whole["k"]), own.spread(dv, whole["v"]), dsink

    def fake(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        check_tensors(title, q, k, v)
        *lead, length, h, _d = q.shape
        return q.new_empty((*lead, length, h, v.shape[-1])), lse_like(q, (*lead, h, length))

    def plan_of(bound: BoundAnnotation, site: SplitSite, given: Given) -> Plan:
        layout = Layout.contiguous(site.size, site.parts)
        _, h, g, *_ = sizes(bound)
        return plan(Problem(family.worst(given, site.size, site.size), layout, layout), (h, g))

    by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
    attend.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, by_position, annotation=t) for n, t in arguments.items()],
        return_annotation=tuple[Tensor, Tensor],
    )
    attend.__name__ = name.split("::")[1]
    attend.__doc__ = f"The op below :func:`{title}`, as it stands in a graph."
    return register_op(
        lambda **given: annotation(title, family, given),
        name=name,
        title=title,
        rule=rule_of(plan_of, family),
        differentiable=("q", "k", "v", "sink"),
        fake=fake,
        backward=run_backward,
    )(attend)


def call_op(
    op: AnnotatedOp,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Callable[[], tuple[Mapping[str, Tensor], Mapping[str, Any]]],
    options: Options,
    process_group: GroupLike,
    **unsupported: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Check a user's call and make it; returns out, and lse if asked for.

    Args:
        pattern: checks and returns the family's integer tensors and its numbers.
        unsupported: arguments of the public function that must be at their defaults.
    """
    record = op.record
    title = record.title

    def check() -> list[Any]:
        refuse_unsupported(title, **unsupported)
        check_tensors(title, q, k, v)
        tensors, numbers = pattern()
        named: dict[str, Any] = {"q": q, "k": k, "v": v, **tensors}
        named |= dict.fromkeys(OPTIONAL_TENSORS)
        named |= {
            **numbers,
            **dict.fromkeys(OPTIONS),
            "dropout_p": dropout_of(title, options.dropout_p),
            **part_numbers(title, "q_rows", options.q_rows, "row"),
            **part_numbers(title, "q_heads", options.q_heads, "head"),
            "head_total": 0,
        }
        if named["head_parts"] and q.ndim > 1:
            named["head_total"] = named["head_parts"] * int(q.shape[-2])
        if options.dropout_p and options.dropout_seed is None and _threads(process_group):
            raise ArgumentError(
                f"{title}: ranks that are threads share one generator, so each would draw another "
                "seed; give dropout_seed"
            )
        watched = not torch.compiler.is_compiling()
        if watched:  # the shapes of q, k, v first: the rest is checked against them
            record.bind(named)
        named |= {**options.tensors(title, q), **options.numbers(title, q)}
        refuse_with_parts(title, named, ranks=1)
        if watched and any(named[name] is not None for name in OPTIONAL_TENSORS):
            record.bind(named)
        return list(named.values())[3:-1]

    rest = checked(title, process_group, check)
    out, lse = op(q, k, v, *rest, group_name(process_group))
    return (out, lse) if options.return_lse else out


def _threads(process_group: GroupLike) -> bool:
    return isinstance(process_group, InProcessComm) and process_group.size > 1
