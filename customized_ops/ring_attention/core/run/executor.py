"""Runs a rank's plan: the one implementation of every distributed attention pattern here.

Forward                                      Backward, the same plan reversed
1. ask for keys, and for remote queries:     1. dout, out and lse travel with the remote queries
   rows of other ranks computed here
2. attend the rank's own keys                2. the same; how they are ordered with 3 is chosen
3. attend each further stage's keys as       3. each stage: fetch keys, add up dq, send dk and dv
   they arrive, merge                           home, where they are added up
4. send home out and lse of remote           4. send home dq of remote queries
   queries, where parts of a row are merged
5. merge the results of 2, 3 and 4           5. add up the results of 2, 3 and 4

Step 4 comes, in both passes, after the last stage in which any rank has remote queries.

Attending the rank's own keys with its own rows needs nothing from peers and runs on the caller's
stream; all else runs on a second stream of higher priority (``side_stream``), hidden behind it.

Where the plan splits heads, a rank computes its share of them only. Where the plan says so,
received keys arrive in groups of heads: a group is attended, and its gradients go home, while the
next arrives. Groups share no head, so their results are concatenated and never merged.
Between the two passes q, k, v, out and lse of the rank's own tokens are kept, and nothing that was
received.

Merging and adding compute in the accumulation dtype. Three roundings follow: of out to q's dtype
and of gradients to ``reduce_dtype`` before they travel, and of results at the end. (The design page
has the table.) What arrives is added or merged in rank order, so the forward is the same bit
for bit from run to run. The backward is, too, where that of the kernel is (``deterministic``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm import Comm
from ..kernels import BackwardOperands, ForwardOperands, Kernel, Pairs, Scoring
from ..merge.merge import accumulation_dtype
from ..plan import Plan
from .backward_pass import BackwardPass
from .call_pairs import only_call
from .forward_pass import ForwardPass
from .rank_heads import RankHeads
from .rank_pass import RankCall
from .replays.replay import kernel_backward, kernel_forward, replayed_pass


def attention_forward(
    plan: Plan,
    comm: Comm,
    kernel: Kernel,
    given: ForwardOperands,
    scoring: Scoring,
    key_positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's rows.

    Args:
        given: q [b, l, h, d], k [b, m, g, d], v [b, m, g, e]: this rank's tokens, as the plan's
            layouts say; h is a multiple of g.
        scoring: how scores become probabilities.
        key_positions: int64[k_len], where each key stands on the queries' scale, for ALiBi; None
            aligns the ends of the two sequences.
    Returns:
        out [b, l, h, e] in q's dtype and lse [b, h, l].
    """
    given = ForwardOperands(*map(_dense, given))
    if (pairs := _only_call(plan, comm.rank, scoring)) is not None:
        out, lse = kernel_forward(kernel, given, pairs, scoring)
        return out.to(given.q.dtype), lse

    def run() -> tuple[Tensor, Tensor]:
        heads = RankHeads(plan, comm.rank, given.q, given.k, scoring, key_positions)
        return ForwardPass(RankCall(plan, comm, kernel, heads), given).run()

    return replayed_pass(run, plan, comm, kernel, scoring, given)


def attention_backward(
    plan: Plan,
    comm: Comm,
    kernel: Kernel,
    given: BackwardOperands,
    scoring: Scoring,
    key_positions: Tensor | None = None,
    *,
    deterministic: bool = False,
    reduce_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for this rank's q, k, v.

    Args:
        given: of the same tokens. dlse is None on every rank of a call, or on none.
        deterministic: whether gradients must be the same bit for bit from run to run.
        reduce_dtype: dtype of gradients on the wire, the same on every rank. By default it is
            q's. Where the plan makes a rank attend another rank's rows over keys that it received,
            it is the accumulation dtype, because those gradients may already be sums
            (:attr:`.Plan.one_call_each`).
    """
    dout, q, k, v, out = map(_dense, given[:5])
    given = BackwardOperands(dout, q, k, v, out, given.lse, given.dlse)
    if (pairs := _only_call(plan, comm.rank, scoring)) is not None:
        grads = kernel_backward(kernel, given, pairs, scoring, deterministic=deterministic)
        return grads[0].to(q.dtype), grads[1].to(k.dtype), grads[2].to(v.dtype)
    wire = reduce_dtype or (q.dtype if plan.one_call_each else accumulation_dtype(q.dtype))

    def run() -> tuple[Tensor, Tensor, Tensor]:
        heads = RankHeads(plan, comm.rank, q, k, scoring, key_positions)
        call = RankCall(plan, comm, kernel, heads)
        return BackwardPass(call, given, wire, deterministic=deterministic).run()

    return replayed_pass(run, plan, comm, kernel, scoring, given, wire, deterministic=deterministic)


def _only_call(plan: Plan, rank: int, scoring: Scoring) -> Pairs | None:
    """:func:`.only_call`; None where the kernel needs the tokens' global indices."""
    return None if scoring.needs_tokens else only_call(plan, rank)


def _dense(t: Tensor) -> Tensor:
    """Kernels want the last dim dense, and load 16 bytes at a time; other strides are theirs to
    handle."""
    step = 16 // t.itemsize
    if t.is_contiguous() and not t.storage_offset() % step:
        return t
    aligned = not t.storage_offset() % step and all(s % step == 0 for s in t.stride()[:-1])
    if aligned and (t.stride(-1) == 1 or t.shape[-1] <= 1):
        return t
    return t.clone(memory_format=torch.contiguous_format)
