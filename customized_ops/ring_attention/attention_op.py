"""How an attention op is declared: its signature in a graph, its annotation, its partition rule.

wrap_*_attn_func            checks what the user passed, names the group
  -> seqshard::*_attn       the op in a graph: tensors, numbers, strings      declared here
    -> attention_call       the op call becomes a plan, which is run

All ops have the same arguments but for those that say which pairs attend: q, k, v, integer tensors
(cu_seqlens, a mask), alibi_slopes, sink, dropout_seed, numbers (causal, window), and the options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from annotations import AnnotatedOp, register_op
from annotations.binding import BoundAnnotation
from annotations.rules import Communicates, InnerCost, PartitionRule, SplitSite

from .arguments import (
    ArgumentError,
    Options,
    check_heads,
    check_tensors,
    checked,
    dropout_of,
    refuse_unsupported,
)
from .attention_call import backward, forward, lse_like, resolve
from .core.comm import Comm
from .core.groups import GroupLike, group_name
from .core.inprocess import InProcessComm
from .core.layout import Layout
from .core.mask import AttnMask
from .core.plan import Plan, make_plan

Given = Mapping[str, Any]  # an op's arguments by name

OPTIONAL_TENSORS = ("alibi_slopes", "sink", "dropout_seed")
OPTIONS: dict[str, type] = {
    "softmax_scale": float,
    "softcap": float,
    "dropout_p": float,
    "return_lse": bool,
    "kernel": str,
    "layout": str,
    "k_layout": str,
    "group": str,
}


@dataclass(frozen=True)
class Problem:
    """Which pairs attend in a call, and where the tokens lie.

    Attributes:
        key_positions: int64[k_len] array, where keys stand on the queries' scale, for ALiBi; None
            aligns the ends of the sequences.
    """

    mask: AttnMask
    q_layout: Layout
    k_layout: Layout
    key_positions: Any = None


@dataclass(frozen=True)
class Family:
    """Ops that say in one way which pairs attend.

    Attributes:
        packed: q, k, v are [l, h, d] rather than [b, l, h, d].
        tensors: integer tensors after v, and how they are annotated.
        numbers: arguments that say which pairs attend, and their types.
        same_length: q and k always have as many tokens as each other.
        problem: from title, arguments and group to the problem; raises ValueError where they
            contradict one another.
        worst: from arguments and a number of tokens to the mask that costs are taken from.
    """

    packed: bool
    tensors: Mapping[str, str]
    numbers: Mapping[str, type]
    same_length: bool
    problem: Callable[[str, Given, Comm], Problem]
    worst: Callable[[Given, int], AttnMask]

    @property
    def arguments(self) -> dict[str, Any]:
        """Name and type of every argument of the op in a graph, in order."""
        named: dict[str, Any] = dict.fromkeys(("q", "k", "v", *self.tensors), Tensor)
        named |= dict.fromkeys(OPTIONAL_TENSORS, Tensor | None)
        return {**named, **self.numbers, **OPTIONS}


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
            problem = family.problem(title, given, comm)
            heads = given["q"].shape[-2], given["k"].shape[-2]
            return plan(problem, heads), problem.key_positions

        return resolve(title, given, make, compare=compare)

    def attend(**given: Any) -> tuple[Tensor, Tensor]:
        return forward(resolved(given, True), given, family.packed)

    def run_backward(dout: Any, dlse: Any, *args: Any) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = args
        given = dict(zip(arguments, inputs, strict=True))
        return backward(resolved(given, False), dout, dlse, given, out, lse, family.packed)

    def fake(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        check_tensors(title, q, k, v)
        *lead, length, h, _d = q.shape
        return q.new_empty((*lead, length, h, v.shape[-1])), lse_like(q, (*lead, h, length))

    def plan_of(bound: BoundAnnotation, site: SplitSite, given: Given) -> Plan:
        layout = Layout.contiguous(site.size, site.parts)
        _, h, g, *_ = _sizes(bound)
        return plan(Problem(family.worst(given, site.size), layout, layout), (h, g))

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
        rule=_rule(plan_of, family),
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
        }
        if options.dropout_p and options.dropout_seed is None and _threads(process_group):
            raise ArgumentError(
                f"{title}: ranks that are threads share one generator, so each would draw another "
                "seed; give dropout_seed"
            )
        watched = not torch.compiler.is_compiling()
        if watched:  # the shapes of q, k, v first: the rest is checked against them
            record.bind(named)
        named |= {**options.tensors(title, q), **options.numbers(title, q)}
        if watched and any(named[name] is not None for name in OPTIONAL_TENSORS):
            record.bind(named)
        return list(named.values())[3:-1]

    rest = checked(title, process_group, check)
    out, lse = op(q, k, v, *rest, group_name(process_group))
    return (out, lse) if options.return_lse else out


def _threads(process_group: GroupLike) -> bool:
    return isinstance(process_group, InProcessComm) and process_group.size > 1


def annotation(title: str, family: Family, given: Given) -> str:
    """The annotation of a call, from the shapes it is called with.

    Dropout draws by global head and batch entry, which a rank with some of them would not know:
    with it neither can be split. Nor can a cross-attention's sequences, which are two identifiers.
    """
    q, k = given["q"], given["k"]
    expected = 3 if family.packed else 4
    plain = q.ndim == k.ndim == expected
    h, g = _heads(title, q, k) if plain else ("h", "h")
    cross = plain and not family.same_length and q.shape[-3] != k.shape[-3]
    batch, lq, lk = "b", *(("l^", "m^") if cross else ("l", "l"))
    if given["dropout_p"]:
        batch = "b^"
        h, g = (f"(g^ {h[3:-1]})", "g^") if h.startswith("(") else ("h^", "h^")
    lead = "" if family.packed else f"{batch} "
    inputs = [f"{lead}{lq} {h} hd^", f"{lead}{lk} {g} hd^", f"{lead}{lk} {g} vd^"]
    inputs += family.tensors.values()
    slopes, sink, seed = (given[name] for name in OPTIONAL_TENSORS)
    entries = "1" if family.packed else batch
    inputs.append("?" if slopes is None else h if slopes.ndim == 1 else f"{entries} {h}")
    inputs += ["?" if sink is None else h, "?" if seed is None else "1"]
    while inputs[-1] == "?":  # says nothing at the end, where errors show it
        inputs.pop()
    return f"{', '.join(inputs)} -> {lead}{lq} {h} vd^, {lead}{h} {lq}"


def _heads(title: str, q: Tensor, k: Tensor) -> tuple[str, str]:
    """How heads are annotated: ``(g 4)`` and ``g`` with grouped queries."""
    check_heads(title, q, k)
    h, g = int(q.shape[-2]), int(k.shape[-2])
    return ("h", "h") if h == g else (f"(g {h // g})", "g")


def _sizes(bound: BoundAnnotation) -> tuple[int, int, int, int, int]:
    """batch, heads of q, heads of k, head dim of q, head dim of v."""
    q, k, v = (s for s in bound.input_shapes[:3] if s is not None)
    return (q[0] if len(q) == 4 else 1), q[-2], k[-2], q[-1], v[-1]


def _rule(plan_of: Callable[[BoundAnnotation, SplitSite, Given], Plan], family: Family) -> Any:
    """The partition rule of an attention op: a split of ``l`` communicates, others do not.

    Args:
        plan_of: the plan that a call split at a site would run, for its costs.
    """

    def site_arguments(site: SplitSite) -> dict[str, Any]:
        return {"group": site.group, "layout": Layout.contiguous(site.size, site.parts).spec}

    def cost(bound: BoundAnnotation, site: SplitSite, given: Given, itemsize: int) -> InnerCost:
        plan = plan_of(bound, site, given)
        batch, h, g, d, e = _sizes(bound)
        mean = plan.area.mean()
        return InnerCost(
            what="k, v" + (" and q rows" if plan.q_tokens().any() else ""),
            forward_bytes=batch * int(plan.forward_bytes(h, g, d, e, itemsize)[:, 1].max()),
            backward_bytes=batch * int(plan.backward_bytes(h, g, d, e, itemsize)[:, 1].max()),
            imbalance=float(plan.area.max() / mean) if mean else 1.0,
        )

    def flops(bound: BoundAnnotation, given: Given) -> float:
        batch, h, _, d, e = _sizes(bound)
        return 2.0 * batch * h * (d + e) * family.worst(given, bound.sizes["l"]).area

    return PartitionRule({"l": Communicates(site_arguments, cost)}, flops)
