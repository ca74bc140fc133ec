"""A call bound to its plan and kernel: runs it, and what is done around the executor.

Sinks are handled here, for every kernel alike. A sink is a logit s per head that takes part in the
softmax with no value (gpt-oss, arXiv:2508.10925, 2025):

    lse' = log(exp(lse) + exp(s))      out' = exp(lse - lse') out

With lse' and out' in the place of lse and out the gradients of q, k, v are what they should be, and

    ds = sum over rows of exp(s - lse') (dlse' - rowsum(dout' * out'))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.comm import Comm
from ..core.kernels import Kernel, Scoring
from ..core.merge.merge import accumulation_dtype
from ..core.plan import Plan
from ..core.run import te_cp
from ..core.run.executor import attention_backward, attention_forward
from .call import AttentionCall
from .options import OpOptions

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
    kernel: Kernel | te_cp.ContextParallel
    scoring: Scoring | None
    key_positions: Tensor | None
    reduce_dtype: torch.dtype | None

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
        if isinstance(self.kernel, te_cp.ContextParallel):
            return self.kernel.forward(q, k, v)
        if packed:
            q, k, v = _batched(q, k, v)
        if _nothing(q):
            b, length, h, _ = q.shape
            out, lse = q.new_empty((b, length, h, v.shape[-1])), lse_like(q, (b, h, length))
        else:
            scoring = self.scoring or scoring_of(self.call.options, slopes, seed)
            out, lse = attention_forward(
                self.plan, comm, self.kernel, q, k, v, scoring, self.key_positions
            )
            if sink is not None:
                out, lse = _with_sink(out, lse, sink)
        out, lse = out.contiguous(), lse.contiguous()
        return (out.squeeze(0), lse.squeeze(0)) if packed else (out, lse)

    def backward(
        self,
        comm: Comm,
        grads: Sequence[Tensor | None],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        optional: Sequence[Tensor | None],
        out: Tensor,
        lse: Tensor,
    ) -> Gradients:
        """Gradients of q, k, v and the sink from those of out and of lse, None for zeros."""
        own = self.call.key_heads
        if own is None:
            return self._backward(comm, grads, q, k, v, optional, out, lse)
        held = own.of(k), own.of(v)
        dq, dk, dv, dsink = self._backward(comm, grads, q, *held, optional, out, lse)
        assert dk is not None and dv is not None
        return dq, own.spread(dk, k), own.spread(dv, v), dsink

    def _backward(
        self,
        comm: Comm,
        grads: Sequence[Tensor | None],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        optional: Sequence[Tensor | None],
        out: Tensor,
        lse: Tensor,
    ) -> Gradients:
        (dout, dlse), (slopes, sink, seed) = grads, optional
        options, packed = self.call.options, self.call.source.packed
        if isinstance(self.kernel, te_cp.ContextParallel):
            dout = torch.zeros_like(out) if dout is None else dout
            return (*self.kernel.backward(dout, q, k, v), None)
        if packed:
            q, k, v, out, lse, dout, dlse = _batched(q, k, v, out, lse, dout, dlse)
        if _nothing(q):
            found = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            dsink = None if sink is None else torch.zeros_like(sink)
            return (*(_unbatched(*found) if packed else found), dsink)
        if dout is None:
            dout = torch.zeros_like(out)
        # Every rank must know alike whether a gradient flows into lse, because it changes what the
        # backward sends, and autograd tells a rank only of its own loss.
        if dlse is None and options.return_lse and comm.size > 1:
            dlse = torch.zeros_like(lse)
        dsink = None if sink is None else _sink_gradient(dout, dlse, out, lse, sink)
        found = attention_backward(
            self.plan,
            comm,
            self.kernel,
            dout,
            q,
            k,
            v,
            out,
            lse,
            self.scoring or scoring_of(options, slopes, seed),
            self.key_positions,
            dlse=dlse,
            deterministic=options.deterministic,
            reduce_dtype=self.reduce_dtype,
        )
        return (*(_unbatched(*found) if packed else found), dsink)


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
    return (
        (torch.exp(sink.to(lse.dtype)[:, None] - _finite(lse)) * flow)
        .sum(dim=(0, 2))
        .to(sink.dtype)
    )


def _batched(*tensors: Any) -> list[Any]:
    """Packed tensors get a batch of one in front."""
    return [None if t is None else t.unsqueeze(0) for t in tensors]


def _unbatched(*tensors: Tensor) -> list[Tensor]:
    return [t.squeeze(0) for t in tensors]


def _nothing(q: Tensor) -> bool:
    """No heads or no batch entries: there were more ranks than of them to share."""
    return q.shape[-2] == 0 or q.shape[0] == 0


def lse_like(q: Tensor, shape: tuple[int, ...]) -> Tensor:
    """An empty tensor as an op's lse: accumulation dtype, on q's device."""
    return q.new_empty(shape, dtype=accumulation_dtype(q.dtype))
