"""What a kernel is asked for by a call, and which one runs it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..core.comm import Comm
from ..core.kernels import FEATURES, LARGE, Kernel, Request, Scoring, choose
from ..core.kernels.shape_class import needs_window, shape_class
from ..core.kernels.speeds import bucket
from ..core.plan import Plan
from ..core.run import te_cp
from .arguments import ArgumentError
from .call import AttentionCall, TensorSpec


def _request(call: AttentionCall, scoring: Scoring, plan: Plan) -> Request:
    """What a kernel is asked for: of the whole mask, so that every rank asks for the same."""
    q, v, (q_heads, kv_heads) = call.q, call.v, call.heads
    needs = dict.fromkeys(scoring.features, True)
    needs["window"] = needs_window(plan.mask)
    needs["lse gradient"] = call.options.return_lse
    needs["deterministic"] = call.options.deterministic
    needs["64-bit indices"] = most_elements(plan, q, v, kv_heads) >= LARGE
    share = plan.largest_share(q_heads, kv_heads)
    return Request(
        device=q.device,
        dtype=q.dtype,
        head_dim=q.shape[-1],
        v_dim=v.shape[-1],
        q_heads=share.q_heads,
        kv_heads=share.kv_heads,
        features=tuple(name for name in FEATURES if needs.get(name)),
        shape_class=shape_class(plan.mask),
        tokens=bucket(plan.mask.k_len),
    )


def most_elements(plan: Plan, q: TensorSpec, v: TensorSpec, kv_heads: int) -> int:
    """Of a tensor that a kernel is given on any rank, no less: of a rank's own tokens, with the
    heads between which its share lies, or of tokens that it received, of its share alone."""
    q_heads = q.shape[-2]
    share, team = plan.largest_share(q_heads, kv_heads), plan.team_size > 1
    sizes = []
    for held, moved, heads, of_share in (
        (plan.q_layout, plan.q_tokens(), q_heads, share.q_heads),
        (plan.k_layout, plan.kv_tokens(), kv_heads, share.kv_heads),
    ):
        own, received = np.asarray(held.sizes), moved[:, 1]
        # What ranks of a team send each other, and keys that are gathered, have their own among it.
        arrived = received + own if team or held is plan.k_layout else received
        sizes += [own.max() * heads, arrived.max() * of_share]
    batch = q.shape[0] if len(q.shape) == 4 else 1
    return batch * int(max(sizes)) * max(q.shape[-1], v.shape[-1])


def kernel_of(
    call: AttentionCall, scoring: Scoring, plan: Plan, comm: Comm
) -> Kernel | te_cp.ContextParallel:
    """What runs the call: a kernel under the executor, or TransformerEngine's own.

    Raises:
        KernelError, ArgumentError: the kernel that was asked for cannot do this.
    """
    request, title, options = _request(call, scoring, plan), call.op.title, call.options
    name = options.kernel
    if name not in te_cp.COMMS:
        return choose(title, name, request)
    for argument in ("reduce_dtype", "team_size"):
        if getattr(options, argument):
            raise ArgumentError(f"{title}: kernel {name!r} takes no {argument}; leave it None")
    q_heads, kv_heads = call.heads  # it splits them by itself
    return te_cp.choose(
        title,
        name,
        replace(request, q_heads=q_heads, kv_heads=kv_heads),
        plan,
        comm,
        scoring.softmax_scale,
        packed=call.source.packed,
        sink=call.given[1],
        deterministic=options.deterministic,
    )
