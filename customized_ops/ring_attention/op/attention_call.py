"""Running an attention op call: arguments -> plan -> executor, and what is done around it.

Sinks are handled here, for every kernel alike. A sink is a logit s per head that takes part in the
softmax with no value (gpt-oss, arXiv:2508.10925, 2025):

    lse' = log(exp(lse) + exp(s))      out' = exp(lse - lse') out

With lse' and out' in the place of lse and out the gradients of q, k, v are what they should be, and

    ds = sum over rows of exp(s - lse') (dlse' - rowsum(dout' * out'))
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from annotations.library.cached_calls import remembered

from ..core.comm import Comm
from ..core.comm.comm_groups import comm_by_name
from ..core.kernels import FEATURES, LARGE, Kernel, Request, Scoring, check_name, choose
from ..core.kernels.shape_class import needs_window, shape_class
from ..core.kernels.speeds import bucket
from ..core.layout import Layout
from ..core.merge.merge import accumulation_dtype
from ..core.plan import Plan
from ..core.run.executor import attention_backward, attention_forward
from . import agreement, te_cp
from .arguments import REDUCE_DTYPES, ArgumentError, check_tensors

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Call:
    """What an op call needs beside its tensors and its group: the same for all calls alike.

    Attributes:
        scoring: None where it has tensors, which are each call's own.
        lse_used: whether a gradient may flow into lse. Every rank must know that alike, because it
            changes what the backward sends, and autograd tells a rank only of its own loss.
        key_positions: see :func:`~.core.executor.attention_forward`.
    """

    plan: Plan
    kernel: Kernel | te_cp.ContextParallel
    scoring: Scoring | None
    lse_used: bool
    key_positions: Tensor | None
    deterministic: bool
    reduce_dtype: torch.dtype | None

    def scoring_of(self, given: Arguments) -> Scoring:
        """How scores become probabilities in one call."""
        return self.scoring or scoring_of(given)


# By group, so that a new group of an old one's name starts afresh, and what was found goes with it.
_resolved: WeakKeyDictionary[Comm, dict[Any, Call]] = WeakKeyDictionary()
# As many as there are plans kept: a plan of many pieces may take megabytes.
MOST_RESOLVED = 32


def resolve(
    op: str,
    given: Arguments,
    values: Hashable,
    make: Callable[[Comm], tuple[Plan, Any]],
    *,
    compare: bool,
) -> tuple[Call, Comm]:
    """Check the call, make its plan, and compare it over the group where its ranks do that.

    Args:
        given: the op's arguments by name.
        values: all that ``make``, kernel and scoring depend on, tensors by their shapes or values.
        make: the plan on a given group, and the positions of keys or None; raises ValueError where
            the arguments contradict one another.
        compare: False where the ranks have compared this call before (in the backward).
    """
    comm = comm_by_name(given["group"])
    known = _resolved.get(comm)
    if known is None:
        known = _resolved.setdefault(comm, {})
    call = known.get(values)
    if call is not None:
        if compare and agreement.enabled(comm):
            facts = _facts(given, call.plan)
            agreement.agree(op, comm, facts, None, _layouts(call.plan), _hints(given))
        return call, comm
    made = _resolve(op, given, comm, make, compare=compare)
    if not isinstance(made.kernel, te_cp.ContextParallel):  # which keeps its group
        remembered(known, values, lambda: made, MOST_RESOLVED)
    return made, comm


def _resolve(
    op: str,
    given: Arguments,
    comm: Comm,
    make: Callable[[Comm], tuple[Plan, Any]],
    *,
    compare: bool,
) -> Call:
    q, k, v = (given[name] for name in ("q", "k", "v"))
    problem: Exception | None = None
    plan = positions = scoring = kernel = None
    try:
        check_tensors(op, q, k, v)
        check_name(op, given["kernel"], te_cp.COMMS)  # before ranks compare their lengths
        scoring = scoring_of(given)
        plan, positions = make(comm)
        kernel = kernel_of(op, given, scoring, plan, comm)
    except Exception as error:  # whatever it is, the peers must not wait for this rank
        problem = error
    if compare and agreement.enabled(comm):
        agreement.agree(op, comm, _facts(given, plan), problem, _layouts(plan), _hints(given))
    if problem is not None:
        raise problem
    assert plan is not None and scoring is not None and kernel is not None
    if positions is not None:
        positions = _on_device(positions.tobytes(), q.device)
    own = None if scoring.needs_tokens else scoring  # those are with ALiBi and with dropout
    reduce_dtype = REDUCE_DTYPES[given["reduce_dtype"]]
    return Call(
        plan, kernel, own, given["return_lse"], positions, given["deterministic"], reduce_dtype
    )


def scoring_of(given: Arguments) -> Scoring:
    """How scores become probabilities, from an op's arguments."""
    slopes = given["alibi_slopes"]
    if slopes is not None:
        slopes = slopes.detach() if slopes.ndim == 2 else slopes.detach().unsqueeze(0)
    return Scoring(
        given["softmax_scale"], given["softcap"], slopes, given["dropout_p"], given["dropout_seed"]
    )


def request_of(given: Arguments, scoring: Scoring, plan: Plan) -> Request:
    """What a kernel is asked for, from an op's arguments: of the whole mask, so that every rank
    asks for the same."""
    q, k, v = (given[name] for name in ("q", "k", "v"))
    needs = dict.fromkeys(scoring.features, True)
    needs["window"] = needs_window(plan.mask)
    needs["lse gradient"] = given["return_lse"]
    needs["deterministic"] = given["deterministic"]
    needs["64-bit indices"] = _most_elements(plan, q, k, v) >= LARGE
    share = plan.largest_share(q.shape[-2], k.shape[-2])
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


def _most_elements(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> int:
    """Of a tensor that a kernel is given on any rank, no less: of a rank's own tokens, with the
    heads between which its share lies, or of tokens that it received, of its share alone."""
    share, team = plan.largest_share(q.shape[-2], k.shape[-2]), plan.team_size > 1
    sizes = []
    for held, moved, heads, of_share in (
        (plan.q_layout, plan.q_tokens(), q.shape[-2], share.q_heads),
        (plan.k_layout, plan.kv_tokens(), k.shape[-2], share.kv_heads),
    ):
        own, received = np.asarray(held.sizes), moved[:, 1]
        # What ranks of a team send each other, and keys that are gathered, have their own among it.
        arrived = received + own if team or held is plan.k_layout else received
        sizes += [own.max() * heads, arrived.max() * of_share]
    batch = q.shape[0] if q.ndim == 4 else 1
    return batch * int(max(sizes)) * max(q.shape[-1], v.shape[-1])


def kernel_of(
    op: str, given: Arguments, scoring: Scoring, plan: Plan, comm: Comm
) -> Kernel | te_cp.ContextParallel:
    """What runs the call: a kernel under the executor, or TransformerEngine's own."""
    request, name = request_of(given, scoring, plan), given["kernel"]
    if name not in te_cp.COMMS:
        return choose(op, name, request)
    for argument in ("reduce_dtype", "team_size"):
        if given[argument]:
            raise ArgumentError(f"{op}: kernel {name!r} takes no {argument}; leave it None")
    q_heads, kv_heads = given["q"].shape[-2], given["k"].shape[-2]  # it splits them by itself
    return te_cp.choose(
        op,
        name,
        replace(request, q_heads=q_heads, kv_heads=kv_heads),
        plan,
        comm,
        scoring.softmax_scale,
        packed=given["q"].ndim == 3,
        sink=given["sink"] is not None,
        deterministic=given["deterministic"],
    )


@lru_cache(maxsize=64)
def _on_device(positions: bytes, device: torch.device) -> Tensor:
    return torch.from_numpy(np.frombuffer(positions, dtype=np.int64).copy()).to(device)


def _facts(given: Arguments, plan: Plan | None) -> dict[str, str]:
    """What must be the same on every rank of a group, as text."""
    facts = {name: _without_tokens(given[name]) for name in ("q", "k", "v")}
    facts |= {"dtype": str(given["q"].dtype), "device": given["q"].device.type}
    options = (
        "softmax_scale softcap dropout_p return_lse deterministic reduce_dtype kernel team_size"
    )
    for name in options.split():
        facts[name] = repr(given[name])
    # Ranks share the tokens of a sequence, so they must hold the same part of its heads.
    for kind in ("row", "head"):
        part, parts = given[f"{kind}_part"], given[f"{kind}_parts"]
        facts[f"q_{kind}s"] = f"part {part} of {parts}" if parts else "None"
    if given["head_parts"]:
        facts["q_heads"] += f" of {given['head_total']} heads"
    slopes, sink = given["alibi_slopes"], given["sink"]
    facts["sink"] = "None" if sink is None else f"{tuple(sink.shape)} {sink.dtype}"
    facts["alibi_slopes"] = "None"
    if slopes is not None:
        digest = _digest(slopes.detach().double().cpu().numpy())
        facts["alibi_slopes"] = f"{tuple(slopes.shape)} {slopes.dtype} {digest}"
    if given["dropout_seed"] is not None:
        facts["dropout_seed"] = str(given["dropout_seed"].tolist())
    if plan is not None:
        mask = plan.mask
        size = f"{mask.q_len}x{mask.k_len} {mask.area} pairs"
        facts["mask"] = f"{size} {_digest(mask.slices)}"
        facts["layout"] = _tables(plan.q_layout, plan.k_layout)
    return facts


def _layouts(plan: Plan | None) -> dict[str, str]:
    """What the layouts are called. A plan made for equal ones may call them otherwise, and a name
    may leave out where two differ, so ranks compare their tables."""
    return {} if plan is None else {"layout": f"{plan.q_layout} {plan.k_layout}"}


def _hints(given: Arguments) -> dict[str, str]:
    """What a rank may not have thought of, where it and others differ."""
    hints = {
        "dropout_seed": "a seed that is not passed is drawn from torch's generator: seed that "
        "alike on all ranks, or pass dropout_seed="
    }
    if not given["layout"]:
        hints["layout"] = (
            "without layout= each rank takes the others to hold as many tokens as itself; "
            "say what they hold with layout=Layout.from_sizes([...])"
        )
    return hints


@lru_cache(maxsize=64)
def _tables(*layouts: Layout) -> str:
    return " ".join(_digest(layout.table) for layout in layouts)


def _digest(values: np.ndarray) -> str:
    return f"#{hashlib.sha256(values.tobytes()).hexdigest()[:8]}"


def _without_tokens(t: Tensor) -> str:
    """Shape with the sequence dim, which ranks may differ in, as ``*``."""
    shape = list(map(str, t.shape))
    shape[-3] = "*"
    return f"({', '.join(shape)})"


def forward(
    call: Call,
    comm: Comm,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scoring: Scoring,
    sink: Tensor | None,
    packed: bool,
) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's rows, shaped as q."""
    if isinstance(call.kernel, te_cp.ContextParallel):
        return call.kernel.forward(q, k, v)
    if packed:
        q, k, v = _batched(q, k, v)
    if _nothing(q):
        b, length, h, _ = q.shape
        out, lse = q.new_empty((b, length, h, v.shape[-1])), lse_like(q, (b, h, length))
    else:
        out, lse = attention_forward(
            call.plan, comm, call.kernel, q, k, v, scoring, call.key_positions
        )
        if sink is not None:
            out, lse = _with_sink(out, lse, sink)
    out, lse = out.contiguous(), lse.contiguous()
    return (out.squeeze(0), lse.squeeze(0)) if packed else (out, lse)


def _with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    joint = torch.logaddexp(lse, sink.detach().to(lse.dtype)[:, None])
    share = torch.exp(lse - _finite(joint)).transpose(1, 2).unsqueeze(-1)
    return (out * share).to(out.dtype), joint


def _finite(lse: Tensor) -> Tensor:
    """0 for -inf: of rows that attend nothing, whose probabilities are 0 whatever is taken off."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def backward(
    call: Call,
    comm: Comm,
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scoring: Scoring,
    sink: Tensor | None,
    packed: bool,
) -> tuple[Tensor | None, ...]:
    """dq, dk, dv and the gradient of the sink from those of out and of lse."""
    if isinstance(call.kernel, te_cp.ContextParallel):
        dout = torch.zeros_like(out) if dout is None else dout
        return (*call.kernel.backward(dout, q, k, v), None)
    if packed:
        q, k, v, out, lse, dout, dlse = _batched(q, k, v, out, lse, dout, dlse)
    if _nothing(q):
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        dsink = None if sink is None else torch.zeros_like(sink)
        return (*_unbatched(dq, dk, dv), dsink) if packed else (dq, dk, dv, dsink)
    if dout is None:
        dout = torch.zeros_like(out)
    if dlse is None and call.lse_used and comm.size > 1:
        dlse = torch.zeros_like(lse)
    dsink = None if sink is None else _sink_gradient(dout, dlse, out, lse, sink)
    dq, dk, dv = attention_backward(
        call.plan,
        comm,
        call.kernel,
        dout,
        q,
        k,
        v,
        out,
        lse,
        scoring,
        call.key_positions,
        dlse=dlse,
        deterministic=call.deterministic,
        reduce_dtype=call.reduce_dtype,
    )
    return (*_unbatched(dq, dk, dv), dsink) if packed else (dq, dk, dv, dsink)


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
