"""What the attention ops have in common: an op call becomes a plan, and the executor runs it.

wrap_*_attn_func            checks what the user passed, names the group
  -> seqshard::*_attn       the op in a graph: tensors, numbers, strings      (this file)
    -> make_plan, executor  what moves and what is computed                   (core/)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from annotations.binding import BoundAnnotation
from annotations.rules import Communicates, InnerCost, PartitionRule, SplitSite

from . import agreement
from .arguments import ArgumentError, check_heads, check_tensors
from .core.comm import Comm
from .core.executor import attention_backward, attention_forward
from .core.groups import comm_by_name
from .core.kernels import Kernel, Scoring, choose
from .core.layout import Layout
from .core.merge import accumulation_dtype
from .core.plan import Plan


@dataclass(frozen=True)
class Call:
    """An op call, resolved: what to run, over which group, with which kernel."""

    plan: Plan
    comm: Comm
    kernel: Kernel
    softmax_scale: float
    lse_used: bool


@dataclass(frozen=True)
class Options:
    """Arguments that every attention op has: scale, kernel name and group name.

    ``lse_used`` says whether a gradient may flow into lse. Every rank must know that alike, because
    it changes what the backward sends, and autograd tells a rank only of its own loss.
    """

    softmax_scale: float
    kernel: str
    group: str
    lse_used: bool = False


def head_dims(op: str, q: Tensor, k: Tensor) -> tuple[str, str]:
    """How the head dims of q and of k, v are annotated: ``(g 4)`` and ``g`` with grouped queries.

    Raises:
        ArgumentError: the heads of q are not a multiple of those of k.
    """
    check_heads(op, q, k)
    h, g = int(q.shape[-2]), int(k.shape[-2])
    return ("h", "h") if h == g else (f"(g {h // g})", "g")


def resolve(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    make: Callable[[Comm], Plan],
    options: Options,
    *,
    compare: bool,
) -> Call:
    """Check the call, make its plan, and with ``SEQSHARD_CHECK=1`` compare it over the group.

    Args:
        make: the plan on a given group; raises ValueError where the arguments contradict it.
        compare: False where the ranks have compared this call before (in the backward).
    """
    comm = comm_by_name(options.group)
    problem: Exception | None = None
    plan = chosen = None
    try:
        check_tensors(op, q, k, v)
        chosen = choose(options.kernel, q, Scoring(options.softmax_scale))
        plan = make(comm)
    except Exception as error:  # whatever it is, the peers must not wait for this rank
        problem = error
    if compare and agreement.enabled():
        facts = {
            "q": _without_tokens(q),
            "k": _without_tokens(k),
            "v": _without_tokens(v),
            "dtype": str(q.dtype),
            "device": q.device.type,
            "return_lse": str(options.lse_used),
            "softmax_scale": repr(options.softmax_scale),
            "kernel": options.kernel,
            **(_plan_facts(plan) if plan is not None else {}),
        }
        agreement.agree(op, comm, facts, problem)
    if problem is not None:
        raise problem
    assert plan is not None and chosen is not None
    return Call(plan, comm, chosen, options.softmax_scale, options.lse_used)


def _without_tokens(t: Tensor) -> str:
    """Shape with the sequence dim, which ranks may differ in, as ``*``."""
    shape = list(map(str, t.shape))
    shape[-3] = "*"
    return f"({', '.join(shape)})"


def _plan_facts(plan: Plan) -> dict[str, str]:
    digest = hashlib.sha256(plan.mask.slices.tobytes()).hexdigest()[:8]
    return {
        "mask": f"{plan.mask.q_len}x{plan.mask.k_len} {plan.mask.area} pairs #{digest}",
        "layout": f"{plan.q_layout} {plan.k_layout}",
    }


def layout_of(op: str, comm: Comm, spec: str, local: int, total: int | None) -> Layout:
    """Where the tokens lie: ``spec`` if given, else ``total`` tokens (or, where only the local
    length is known, as many on every rank) contiguously.

    Raises:
        ArgumentError: the layout is for another number of ranks or tokens, or gives this rank
            another length than it has.
    """
    if spec:
        layout = Layout.parse(spec)
    else:
        layout = Layout.contiguous(local * comm.size if total is None else total, comm.size)
    if layout.group_size != comm.size:
        raise ArgumentError(
            f"{op}: layout {layout} is for {layout.group_size} ranks, but the group has {comm.size}"
        )
    if total is not None and layout.total != total:
        raise ArgumentError(
            f"{op}: layout {layout} holds {layout.total} tokens, but cu_seqlens end at {total}"
        )
    if layout.sizes[comm.rank] != local:
        raise ArgumentError(
            f"{op}: rank {comm.rank} of {comm.size} holds {local} tokens, but layout {layout} "
            f"gives it {layout.sizes[comm.rank]} (sizes {list(layout.sizes)}); if the sequence is "
            "cut otherwise, say so with layout=Layout.from_sizes([...])"
        )
    return layout


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out [b, l, h, e] and lse [b, h, l] of this rank's rows."""
    if _nothing(q):
        return q.new_empty((*q.shape[:-1], v.shape[-1])), lse_like(q, (q.shape[0], 0, q.shape[1]))
    out, lse = attention_forward(call.plan, call.comm, call.kernel, q, k, v, call.softmax_scale)
    return out.contiguous(), lse.contiguous()


def backward(
    call: Call,
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from the gradients of out and of lse.

    d lse / d scores is the probabilities, so a gradient of lse enters where rowsum(dout * out)
    does, with the opposite sign. One more column of v carries it through any kernel: with out = 1,
    dout = -dlse and v = 0 there, rowsum gains -dlse and nothing else changes.
    """
    if _nothing(q):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if dout is None:
        dout = torch.zeros_like(out)
    if dlse is None and call.lse_used and call.comm.size > 1:
        dlse = torch.zeros_like(lse)
    if dlse is not None:
        column = dlse.transpose(1, 2).unsqueeze(-1).to(dout.dtype)
        dout = torch.cat([dout, -column], dim=-1)
        out = torch.cat([out, torch.ones_like(column)], dim=-1)
        v = torch.nn.functional.pad(v, (0, 1))
    dq, dk, dv = attention_backward(
        call.plan, call.comm, call.kernel, dout, q, k, v, out, lse, call.softmax_scale
    )
    return dq, dk, dv if dlse is None else dv[..., :-1].contiguous()


def _nothing(q: Tensor) -> bool:
    """No heads: more ranks than heads were asked to share them."""
    return q.shape[-2] == 0


def lse_like(q: Tensor, shape: tuple[int, ...]) -> Tensor:
    """An empty tensor as an op's lse: accumulation dtype, on q's device."""
    return q.new_empty(shape, dtype=accumulation_dtype(q.dtype))


PlanOf = Callable[[BoundAnnotation, SplitSite, Mapping[str, Any]], Plan]


def sequence_rule(plan_of: PlanOf) -> PartitionRule:
    """The partition rule of an attention op: a split of ``l`` communicates, others do not.

    Args:
        plan_of: the plan that a call split at a site would run, for its costs.
    """

    def arguments(site: SplitSite) -> dict[str, Any]:
        return {"group": site.group, "layout": Layout.contiguous(site.size, site.parts).spec}

    def shape(bound: BoundAnnotation) -> tuple[int, int, int, int, int]:
        """batch, heads of q, heads of k, head dim of q, head dim of v."""
        q, k, v = (s for s in bound.input_shapes[:3] if s is not None)
        return (q[0] if len(q) == 4 else 1), q[-2], k[-2], q[-1], v[-1]

    def cost(
        bound: BoundAnnotation, site: SplitSite, given: Mapping[str, Any], itemsize: int
    ) -> InnerCost:
        plan = plan_of(bound, site, given)
        batch, h, g, d, e = shape(bound)
        areas = [plan.rank(r).area for r in range(plan.group_size)]
        mean = sum(areas) / len(areas)
        rows = plan.q_tokens()[:, 1].sum()
        return InnerCost(
            what="k, v" + (" and q rows" if rows else ""),
            forward_bytes=batch * int(plan.forward_bytes(h, g, d, e, itemsize)[:, 1].max()),
            backward_bytes=batch * int(plan.backward_bytes(h, g, d, e, itemsize)[:, 1].max()),
            imbalance=max(areas) / mean if mean else 1.0,
        )

    def flops(bound: BoundAnnotation, given: Mapping[str, Any]) -> float:
        whole = SplitSite("l", bound.sizes["l"], 1, "")
        batch, h, _, d, e = shape(bound)
        return 2.0 * batch * h * (d + e) * plan_of(bound, whole, given).mask.area

    return PartitionRule({"l": Communicates(arguments, cost)}, flops)
