"""From a call to what runs it on a group: checked, planned, compared, and kept for calls like it.

Both doors come here: the eager one (:mod:`.eager`) with what a user passed, encoded, the graph one
(:mod:`.graph`) with an op's arguments.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from annotations.library.cached_calls import cached

from ..core.comm import Comm
from ..core.kernels import check_name
from ..core.run import te_cp
from . import agreement
from .bound import Bound, scoring_of
from .call import AttentionCall, AttentionOp
from .facts import facts_of, hints_of, layout_names
from .kernel_request import kernel_of
from .mask_source import Arguments
from .options import REDUCE_DTYPES

# Bound calls kept for each group: a plan of many pieces may take megabytes.
MOST_BOUND = 32

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
            if not isinstance(bound.kernel, te_cp.ContextParallel):  # which keeps its group
                cached(known, call, lambda: bound, MOST_BOUND)
    except Exception as error:  # whatever it is, the peers must not wait for this rank
        problem = error
    if compare and agreement.enabled(comm):
        plan = None if bound is None else bound.plan
        facts = facts_of(given, plan)
        agreement.agree(op.title, comm, facts, problem, layout_names(plan), hints_of(given))
    if problem is not None:
        raise problem
    assert bound is not None
    return bound


def _bind(call: AttentionCall, given: Arguments, comm: Comm) -> Bound:
    options = call.options
    check_name(call.op.title, options.kernel, te_cp.COMMS)  # before ranks compare their lengths
    scoring = scoring_of(options, given["alibi_slopes"], given["dropout_seed"])
    plan, positions = call.plan(comm)
    return Bound(
        call=call,
        plan=plan,
        kernel=kernel_of(call, scoring, plan, comm),
        scoring=None if scoring.needs_tokens else scoring,
        key_positions=None if positions is None else _on_device(positions.tobytes(), call.q.device),
        reduce_dtype=REDUCE_DTYPES[options.reduce_dtype],
    )


@lru_cache(maxsize=64)
def _on_device(positions: bytes, device: torch.device) -> Tensor:
    return torch.from_numpy(np.frombuffer(positions, dtype=np.int64).copy()).to(device)
