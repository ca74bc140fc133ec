"""A call bound to its plan and kernel: made once, kept for calls like it, and run by both doors.

The eager door (:mod:`.eager`) comes here with what a user passed, encoded, the graph one
(:mod:`.graph`) with an op's arguments.

Sinks are handled here, for every kernel alike. A sink is a logit s per head that takes part in the
softmax with no value (gpt-oss, arXiv:2508.10925, 2025):

    lse' = log(exp(lse) + exp(s))      out' = exp(lse - lse') out

With lse' and out' in the place of lse and out the gradients of q, k, v are what they should be, and

    ds = sum over rows of exp(s - lse') (dlse' - rowsum(dout' * out'))
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
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
from ..core.merge.merge import accumulation_dtype
from ..core.plan import Plan
from ..core.run import te_cp
from ..core.run.executor import attention_backward, attention_forward
from . import agreement
from .call import AttentionCall, AttentionOp
from .mask_source import Arguments
from .options import REDUCE_DTYPES, OpOptions
from .planning_share import PLANNING

# Bound calls kept for each group: a plan of many pieces may take megabytes.
MOST_BOUND = 32

Gradients = tuple[Tensor | None, ...]  # of q, k, v and the sink


@dataclass(frozen=True, eq=False)
class Bound:
    """What calls that differ in nothing but data do on one group.

    Attributes:
        kernel: under the executor; or TransformerEngine's own context parallelism.
        scoring: None where it has tensors, which each call brings.
        key_positions: see :func:`~.core.run.executor.attention_forward`.
        reduce_dtype: what gradients travel in; None leaves it to the executor.
    """

    call: AttentionCall
    plan: Plan
    kernel: Kernel | te_cp.TeCall
    scoring: Scoring | None
    key_positions: Tensor | None
    reduce_dtype: torch.dtype | None

    @property
    def keeps_group(self) -> bool:
        """TransformerEngine's own context parallelism keeps its group, so it must not be kept."""
        return isinstance(self.kernel, te_cp.TeCall)

    def forward(
        self, comm: Comm, q: Tensor, k: Tensor, v: Tensor, optional: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """out and lse of this rank's rows, shaped as q; each has memory of its own.

        Args:
            optional: slopes, sink and seed, as :data:`.options.OPTIONAL_TENSORS` names them.
        """
        slopes, sink, seed = optional
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
            saved: q, k, v, the optional tensors, out and lse of the forward.
        """
        q, k, v, *rest = saved
        own = self.call.key_heads
        if own is None:
            return self._backward(comm, grads, q, k, v, *rest)
        dq, dk, dv, dsink = self._backward(comm, grads, q, own.of(k), own.of(v), *rest)
        return dq, own.spread(dk, k), own.spread(dv, v), dsink

    def _backward(
        self,
        comm: Comm,
        grads: Sequence[Tensor | None],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: Tensor | None,
        sink: Tensor | None,
        seed: Tensor | None,
        out: Tensor,
        lse: Tensor,
    ) -> tuple[Any, ...]:
        dout, dlse = grads
        options, packed = self.call.options, self.call.source.packed
        dout = torch.zeros_like(out) if dout is None else dout
        if isinstance(self.kernel, te_cp.TeCall):
            return (*self.kernel.backward(dout, q, k, v), None)
        if packed:
            q, k, v, out, lse, dout, dlse = _batched(q, k, v, out, lse, dout, dlse)
        if _nothing(q):
            found = tuple(map(torch.empty_like, (q, k, v)))
            dsink = None if sink is None else torch.zeros_like(sink)
        else:
            # Every rank must know alike whether a gradient flows into lse, because it changes what
            # the backward sends, and autograd tells a rank only of its own loss.
            if dlse is None and options.return_lse and comm.size > 1:
                dlse = torch.zeros_like(lse)
            dsink = None if sink is None else _sink_gradient(dout, dlse, out, lse, sink)
            found = attention_backward(
                self.plan,
                comm,
                self.kernel,
                BackwardOperands(dout, q, k, v, out, lse, dlse),
                self.scoring or scoring_of(options, slopes, seed),
                self.key_positions,
                deterministic=options.deterministic,
                reduce_dtype=self.reduce_dtype,
            )
        return (*([t.squeeze(0) for t in found] if packed else found), dsink)


# By group, so that a new group of an old one's name starts afresh, and what was found goes with it.
# The eager door adds the same values under what users pass.
_bound: WeakKeyDictionary[Comm, dict[Hashable, Bound]] = WeakKeyDictionary()


def bound_calls(comm: Comm) -> dict[Hashable, Bound]:
    """The bound calls of a group."""
    known = _bound.get(comm)
    return _bound.setdefault(comm, {}) if known is None else known


def bind(op: AttentionOp, given: Arguments, comm: Comm, *, compare: bool) -> Bound:
    """Check a call, make its plan, and compare it over the group where its ranks do that.

    Args:
        given: the op's arguments by name.
        compare: False where the ranks have compared this call before (in the backward).
    Raises:
        ValueError: the call is refused on this rank, or ranks differ.
    """
    known, bound, problem = bound_calls(comm), None, None
    try:
        call = AttentionCall.decode(op, given)
        bound = known.get(call)
        if bound is None:
            bound = _bind(call, given, comm)
            if not bound.keeps_group:
                cached(known, call, lambda: bound, MOST_BOUND)
    except Exception as error:  # whatever it is, the peers must not wait for this rank
        problem = error
    if compare and agreement.enabled(comm):
        plan = None if bound is None else bound.plan
        agreement.agree_on_call(op.title, comm, given, plan, problem)
    if problem is not None:
        raise problem
    assert bound is not None
    return bound


def _bind(call: AttentionCall, given: Arguments, comm: Comm) -> Bound:
    options = call.options
    check_name(call.op.title, options.kernel, te_cp.COMMS)  # before ranks compare their lengths
    scoring = scoring_of(options, given["alibi_slopes"], given["dropout_seed"])
    started = perf_counter()
    plan, positions = call.plan(comm)
    if comm.size > 1:
        PLANNING.add(perf_counter() - started)
    return Bound(
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
    """0 for -inf: of rows that attend nothing, whose probabilities are 0 whatever is taken off."""
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
    """No heads or no batch entries: there were more ranks than of them to share."""
    return q.shape[-2] == 0 or q.shape[0] == 0


def lse_like(q: Tensor, shape: tuple[int, ...]) -> Tensor:
    """An empty tensor as an op's lse: accumulation dtype, on q's device."""
    return q.new_empty(shape, dtype=accumulation_dtype(q.dtype))
