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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from annotations import AnnotatedOp, register_op
from annotations.binding import BoundAnnotation
from annotations.library.autograd import Repeat
from annotations.library.bypass import goes_straight
from annotations.library.cached_calls import alike, remembered
from annotations.rules import SplitSite

from ..core.comm import Comm
from ..core.comm.comm_groups import GroupLike, group_name
from ..core.comm.inprocess import InProcessComm
from ..core.cost import H200, CostModel
from ..core.plan import Plan, make_plan
from ..varlen_utils import on_host
from . import agreement
from .arguments import (
    ArgumentError,
    Options,
    check_team_size,
    check_tensors,
    checked,
    dropout_of,
    refuse_unsupported,
)
from .attention_call import Call, backward, forward, lse_like, resolve
from .attention_family import OPTIONAL_TENSORS, OPTIONS, Arguments, Family, Problem
from .attention_order import layout_at
from .attention_repeat import Pattern, find, key_of, note, repeat_of
from .attention_rule import annotation, rule_of, sizes
from .query_shards import KeyHeads, part_numbers, refuse_with_parts, rows_of


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
    n_tensors = sum(kind in (Tensor, Tensor | None) for kind in arguments.values())

    def plan(
        problem: Problem, heads: tuple[int, int], costs: CostModel = H200, team_size: int = 0
    ) -> Plan:
        return make_plan(
            problem.mask,
            problem.q_layout,
            problem.k_layout,
            assignment=assignment,
            heads=heads if heads[1] else (1, 1),
            team_size=team_size or (None if split_heads else 1),
            costs=costs,
        )

    def resolved(given: Arguments, compare: bool) -> tuple[Call, Comm]:
        def make(comm: Comm) -> tuple[Plan, Any]:
            refuse_with_parts(title, given, comm.size)
            part_of_rows = given["row_parts"] > 0
            rows = family.all_rows(given) if part_of_rows else given["q"].shape[-3]
            problem = family.problem(title, given, rows, comm)
            if part_of_rows:
                problem = rows_of(title, problem, given)
            heads, team_size = (given["q"].shape[-2], given["k"].shape[-2]), given["team_size"]
            check_team_size(title, team_size, comm.size, heads[0])
            return plan(problem, heads, comm.costs, team_size), problem.key_positions

        qkv = given["q"], given["k"], given["v"]
        values = (
            title,
            *[(t.shape, t.dtype, t.device) for t in qkv],
            *[on_host(given[name]).tobytes() for name in family.tensors],
            *[given[name] is None for name in OPTIONAL_TENSORS],
            *list(given.values())[n_tensors:],
        )
        return resolve(title, given, values, make, compare=compare)

    def of_own_heads(given: dict[str, Any]) -> tuple[dict[str, Any], KeyHeads | None]:
        own = KeyHeads.of_call(title, given)
        return (given | {name: own.of(given[name]) for name in "kv"} if own else given), own

    def attend(**given: Any) -> tuple[Tensor, Tensor]:
        given, _ = of_own_heads(given)
        call, comm = resolved(given, True)
        q, k, v, sink = (given[name] for name in ("q", "k", "v", "sink"))
        return forward(call, comm, q, k, v, call.scoring_of(given), sink, family.packed)

    def run_backward(dout: Any, dlse: Any, *args: Any) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = args
        whole = dict(zip(arguments, inputs, strict=True))
        given, own = of_own_heads(whole)
        call, comm = resolved(given, False)
        q, k, v, sink = (given[name] for name in ("q", "k", "v", "sink"))
        rest = out, lse, call.scoring_of(given), sink, family.packed
        grads = backward(call, comm, dout, dlse, q, k, v, *rest)
        if own is None:
            return grads
        dq, dk, dv, dsink = grads
        assert dk is not None and dv is not None
        return dq, own.spread(dk, whole["k"]), own.spread(dv, whole["v"]), dsink

    def repeat(values: Sequence[Any]) -> tuple[Comm, Repeat] | None:
        given = dict(zip(arguments, values, strict=True))
        call, comm = resolved(given, False)
        if given["head_parts"] or call.scoring is None or given["q"].numel() == 0:
            return None
        return comm, repeat_of(call, comm, values[n_tensors:], family.packed)

    def fake(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        check_tensors(title, q, k, v)
        *lead, length, h, _d = q.shape
        return q.new_empty((*lead, length, h, v.shape[-1])), lse_like(q, (*lead, h, length))

    def plan_of(bound: BoundAnnotation, site: SplitSite, given: Arguments) -> Plan:
        layout = layout_at(site, given)
        _, h, g, *_ = sizes(bound)
        return plan(Problem(family.worst(given, site.size, site.size), layout, layout), (h, g))

    by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
    attend.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, by_position, annotation=t) for n, t in arguments.items()],
        return_annotation=tuple[Tensor, Tensor],
    )
    attend.__name__ = name.split("::")[1]
    attend.__doc__ = f"The op below :func:`{title}`, as it stands in a graph."
    op = register_op(
        lambda **given: annotation(title, family, given),
        name=name,
        title=title,
        rule=rule_of(plan_of, family),
        differentiable=("q", "k", "v", "sink"),
        fake=fake,
        backward=run_backward,
    )(attend)
    _repeats[op] = repeat
    return op


# From the op call's arguments to what calls alike do on its group; None where each is its own.
_repeats: dict[AnnotatedOp, Callable[[Sequence[Any]], tuple[Comm, Repeat] | None]] = {}

_NO_TENSORS = (None,) * len(OPTIONAL_TENSORS)

# Of calls that were found sound: by all that was passed, tensors by their shapes.
_numbers: dict[Any, Mapping[str, Any]] = {}
_fitting: dict[Any, BoundAnnotation] = {}


def call_op(
    op: AnnotatedOp,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    options: Options,
    process_group: GroupLike,
    **unsupported: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Check a user's call and make it; returns out, and lse if asked for.

    Args:
        unsupported: arguments of the public function that must be at their defaults.
    """
    title, key = op.record.title, None
    looked_on = torch.compiler.is_compiling() or not goes_straight(q, k, v)
    if not looked_on and (process_group is None or not agreement.enabled(process_group)):
        key = key_of(op, q, k, v, pattern, options, unsupported)
        known = None if key is None else find(key, process_group)
        if known is not None:
            own = known.tensors
            tensors = pattern.tensors().values() if own is None else own
            out, lse = op.again(known.repeat, q, k, v, *tensors, *_NO_TENSORS)
            return (out, lse) if options.return_lse else out

    def check() -> list[Any]:
        refuse_unsupported(title, **unsupported)
        check_tensors(title, q, k, v)
        tensors = {"q": q, "k": k, "v": v, **pattern.tensors()}
        if torch.compiler.is_compiling():
            numbers = _numbers_of(op, tensors, pattern, options)
            optional = options.tensors(title, q)
        else:
            said = alike(options.said + pattern.said)
            switch = torch.are_deterministic_algorithms_enabled()
            key = op, q.shape, k.shape, v.shape, q.dtype, said, switch
            make = partial(_numbers_of, op, tensors, pattern, options)
            numbers = remembered(_numbers, key, make)
            optional = options.tensors(title, q)
            if any(t is not None for t in optional.values()):
                given = tuple([None if t is None else t.shape for t in optional.values()])
                bind = partial(op.record.bind, {**tensors, **optional, **numbers, "group": None})
                remembered(_fitting, (key, given), bind)
        _refuse_unseeded(title, options, process_group)
        return [*tensors.values(), *optional.values(), *numbers.values()]

    given = checked(title, process_group, check)
    given.append(group_name(process_group))
    out, lse = op(*given)
    repeat = None if key is None else _repeats[op](given)
    if repeat is not None:
        n_tensors = len(op.record.tensor_at) - len(OPTIONAL_TENSORS)
        note(key, *repeat, given[3:n_tensors])
    return (out, lse) if options.return_lse else out


def _numbers_of(
    op: AnnotatedOp, tensors: Mapping[str, Tensor], pattern: Pattern, options: Options
) -> Mapping[str, Any]:
    """The numbers of an op call, in the op's order, its group left out."""
    title, q = op.record.title, tensors["q"]
    named: dict[str, Any] = {
        **pattern.numbers(),
        **dict.fromkeys(OPTIONS),
        "dropout_p": dropout_of(title, options.dropout_p),
        **part_numbers(title, "q_rows", options.q_rows, "row"),
        **part_numbers(title, "q_heads", options.q_heads, "head"),
        "head_total": 0,
    }
    if named["head_parts"] and q.ndim > 1:
        named["head_total"] = named["head_parts"] * int(q.shape[-2])
    if not torch.compiler.is_compiling():  # shapes first: the rest is checked against them
        op.record.bind({**tensors, **dict.fromkeys(OPTIONAL_TENSORS), **named})
    named |= options.numbers(title, q)
    refuse_with_parts(title, named, ranks=1)
    del named["group"]
    return named


def _refuse_unseeded(op: str, options: Options, process_group: GroupLike) -> None:
    threads = isinstance(process_group, InProcessComm) and process_group.size > 1
    if options.dropout_p and options.dropout_seed is None and threads:
        raise ArgumentError(
            f"{op}: ranks that are threads share one generator, so each would draw another seed; "
            "give dropout_seed"
        )
