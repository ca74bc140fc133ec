"""A call bound to its plan and kernel: made once, kept for equal calls, and run by both entry
points, :mod:`.eager` and :mod:`.graph`.

Sinks are handled here, the same way for every kernel. A sink is a logit s per head that takes part
in the softmax with no value (gpt-oss, arXiv:2508.10925, 2025):

    lse' = log(exp(lse) + exp(s))      out' = exp(lse - lse') out

With lse' and out' in place of lse and out, the gradients of q, k and v come out right, and

    ds = sum over rows of exp(s - lse') (dlse' - rowsum(dout' * out'))
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from annotations.library.cached_calls import cached

from ..core.comm import Comm
from ..core.kernels import BackwardOperands, ForwardOperands, Kernel, Scoring, check_name
from ..core.layout import Layout
from ..core.merge.merge import accumulation_dtype
from ..core.plan import Plan
from ..core.plan.plans_ahead import PlanningShare, check_expected, plan_made_ahead
from ..core.run import te_cp
from ..core.run.executor import attention_backward, attention_forward
from .arguments import agree, agree_on_call, compares_calls
from .call import AttentionCall, AttentionOp
from .mask_source import MaskSource
from .options import REDUCE_DTYPES, OpOptions

_PLANNING = PlanningShare()
# Bound calls kept for each group: a plan of many pieces may take megabytes.
MOST_BOUND = 32

Gradients = tuple[Tensor | None, ...]  # of q, k, v and the sink


@dataclass(frozen=True, eq=False)
class BoundCall:
    """What all calls that differ only in their data have in common, on one group.

    Attributes:
        kernel: a kernel under the executor, or TransformerEngine's own context parallelism.
        scoring: None where it has tensors, which each call brings.
        key_positions: see :func:`~.core.run.executor.attention_forward`.
        reduce_dtype: the dtype that gradients travel in; None leaves it to the executor.
    """

    call: AttentionCall
    plan: Plan
    kernel: Kernel | te_cp.TeCall
    scoring: Scoring | None
    key_positions: Tensor | None
    reduce_dtype: torch.dtype | None

    @property
    def keeps_group(self) -> bool:
        """Whether this holds a reference to its group, as TransformerEngine's own context
        parallelism does. It is then not cached, or the group would never be freed."""
        return isinstance(self.kernel, te_cp.TeCall)

    def forward(self, comm: Comm, tensors: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """out and lse of this rank's rows, shaped as q; each has memory of its own.

        Args:
            tensors: q, k, v, and the optional ones: slopes, sink and seed.
        """
        q, k, v, slopes, sink, seed = tensors
        own, packed = self.call.key_heads, self.call.source.packed
        if own is not None:
            k, v = own.of(k), own.of(v)
        if isinstance(self.kernel, te_cp.TeCall):
            return self.kernel.forward(q, k, v)
        if packed:
            q, k, v = _batched(q, k, v)
        if _nothing(q):
            b, length, h, _ = q.shape
            out, lse = q.new_empty((b, length, h, v.shape[-1])), lse_like(q, (b, h, length))
        else:
            scoring = self.scoring or scoring_of(self.call.options, slopes, seed)
            given = ForwardOperands(q, k, v)
            with comm.doing(f"{self.call.op.title}, forward"):
                out, lse = attention_forward(
                    self.plan, comm, self.kernel, given, scoring, self.key_positions
                )
            if sink is not None:
                out, lse = _with_sink(out, lse, sink)
        out, lse = out.contiguous(), lse.contiguous()
        return (out.squeeze(0), lse.squeeze(0)) if packed else (out, lse)

    def backward(
        self, comm: Comm, grads: Sequence[Tensor | None], saved: Sequence[Any]
    ) -> Gradients:
        """Gradients of q, k, v and the sink.

        Args:
            grads: of out and of lse, None for zeros.
            saved: the tensors of the forward, out and lse.
        """
        q, whole_k, whole_v, slopes, sink, seed, out, lse = saved
        dout, dlse = grads
        dout = torch.zeros_like(out) if dout is None else dout
        options, own = self.call.options, self.call.key_heads
        k, v = (whole_k, whole_v) if own is None else (own.of(whole_k), own.of(whole_v))
        dsink = None
        packed = self.call.source.packed and not self.keeps_group
        if packed:
            q, k, v, out, lse, dout, dlse = _batched(q, k, v, out, lse, dout, dlse)
        if isinstance(self.kernel, te_cp.TeCall):
            dq, dk, dv = self.kernel.backward(dout, q, k, v)
        elif _nothing(q):
            dq, dk, dv = map(torch.empty_like, (q, k, v))
            dsink = None if sink is None else torch.zeros_like(sink)
        else:
            # All ranks must decide the same about a gradient of lse, because it changes what the
            # backward sends, and autograd shows a rank only its own loss.
            if dlse is None and options.return_lse and comm.size > 1:
                dlse = torch.zeros_like(lse)
            dsink = None if sink is None else _sink_gradient(dout, dlse, out, lse, sink)
            with comm.doing(f"{self.call.op.title}, backward"):
                dq, dk, dv = attention_backward(
                    self.plan,
                    comm,
                    self.kernel,
                    BackwardOperands(dout, q, k, v, out, lse, dlse),
                    self.scoring or scoring_of(options, slopes, seed),
                    self.key_positions,
                    deterministic=options.deterministic,
                    reduce_dtype=self.reduce_dtype,
                )
        if packed:
            dq, dk, dv = dq.squeeze(0), dk.squeeze(0), dv.squeeze(0)
        if own is not None:
            dk, dv = own.spread(dk, whole_k), own.spread(dv, whole_v)
        return dq, dk, dv, dsink


# By group, so that a new group with an old one's name starts afresh, and entries go with theirs.
# The eager entry point adds the same values, with what users pass as keys.
_bound: WeakKeyDictionary[Comm, dict[Hashable, BoundCall]] = WeakKeyDictionary()


def bound_calls(comm: Comm) -> dict[Hashable, BoundCall]:
    """The bound calls of a group."""
    known = _bound.get(comm)
    return _bound.setdefault(comm, {}) if known is None else known


def bind(
    op: AttentionOp,
    make: Callable[[], AttentionCall],
    optional: Sequence[Tensor | None],
    comm: Comm,
    *,
    compare: bool,
) -> BoundCall:
    """Plan a call, and compare it over the group where its ranks do that.

    Args:
        make: the call; raises where it is refused.
        compare: False where the ranks have compared this call before (in the backward).
    """
    known, compare = bound_calls(comm), compare and compares_calls(comm)
    try:
        call = make()
        bound = known.get(call)
        if bound is None:
            bound = _bind(call, optional, comm)
            if not bound.keeps_group:
                cached(known, call, lambda: bound, MOST_BOUND)
    except Exception as error:  # whatever it is, the peers must not wait for this rank
        if compare:
            agree(op.title, comm, {}, error)
        raise
    if compare:
        qkv, options = (call.q, call.k, call.v), call.options._asdict()
        agree_on_call(op.title, comm, qkv, options, optional, bound.plan)
    return bound


def bound_like(like: BoundCall, source: MaskSource, layout: Layout, comm: Comm) -> BoundCall | None:
    """A call that differs from ``like``, which was checked, in its documents and their layout
    alone; None where their plan was not made ahead."""
    options = like.call.options
    known = source.known_as(like.call.source)
    if known is None or like.scoring is None or options.row_parts:
        return None
    decoded, mask = known
    plan = plan_made_ahead(like.plan, mask, layout, comm.costs)
    tokens = like.call.q.shape[-3], like.call.k.shape[-3]
    fits = layout.group_size == comm.size and {layout.sizes[comm.rank]} == {*tokens}
    if plan is None or not fits:
        return None
    options = options._replace(layout=layout.spec, k_layout="")
    call = replace(like.call, source=decoded, options=options)
    kernel = like.kernel
    if call.asked_of(plan) != call.asked_of(like.plan):
        kernel = call.kernel(like.scoring, plan, comm)
    return replace(like, call=call, plan=plan, kernel=kernel, key_positions=None)


def _bind(call: AttentionCall, optional: Sequence[Tensor | None], comm: Comm) -> BoundCall:
    options, (slopes, _, seed) = call.options, optional
    check_name(call.op.title, options.kernel, te_cp.COMMS)  # before ranks compare their lengths
    scoring = scoring_of(options, slopes, seed)
    started = perf_counter()
    plan, positions = call.plan(comm)
    if comm.size > 1:
        check_expected(plan)
        plan.rank(comm.rank)
        _PLANNING.add(perf_counter() - started)
    return BoundCall(
        call=call,
        plan=plan,
        kernel=call.kernel(scoring, plan, comm),
        scoring=None if scoring.needs_tokens else scoring,
        key_positions=None if positions is None else _on_device(positions.tobytes(), call.q.device),
        reduce_dtype=REDUCE_DTYPES[options.reduce_dtype],
    )


@lru_cache(maxsize=64)
def _on_device(positions: bytes, device: torch.device) -> Tensor:
    return torch.from_numpy(np.frombuffer(positions, dtype=np.int64).copy()).to(device)


def scoring_of(options: OpOptions, slopes: Tensor | None, seed: Tensor | None) -> Scoring:
    """How scores become probabilities in one call."""
    if slopes is not None:
        slopes = slopes.detach() if slopes.ndim == 2 else slopes.detach().unsqueeze(0)
    return Scoring(options.softmax_scale, options.softcap, slopes, options.dropout_p, seed)


def _with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    joint = torch.logaddexp(lse, sink.detach().to(lse.dtype)[:, None])
    share = torch.exp(lse - _finite(joint)).transpose(1, 2).unsqueeze(-1)
    return (out * share).to(out.dtype), joint


def _finite(lse: Tensor) -> Tensor:
    """``lse`` with 0 for -inf, in rows that attend nothing: their probabilities are 0 anyway."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _sink_gradient(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, sink: Tensor
) -> Tensor:
    flow = -(dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)
    if dlse is not None:
        flow = flow + dlse
    share = torch.exp(sink.to(lse.dtype)[:, None] - _finite(lse))
    return (share * flow).sum(dim=(0, 2)).to(sink.dtype)


def _batched(*tensors: Any) -> list[Any]:
    """Packed tensors get a batch of one in front."""
    return [None if t is None else t.unsqueeze(0) for t in tensors]


def _nothing(q: Tensor) -> bool:
    """Whether there are no heads or batch entries: there were more ranks than these to share."""
    return q.shape[-2] == 0 or q.shape[0] == 0


def lse_like(q: Tensor, shape: tuple[int, ...]) -> Tensor:
    """An uninitialised tensor like an op's lse: accumulation dtype, on q's device."""
    return q.new_empty(shape, dtype=accumulation_dtype(q.dtype))
