"""Passes, and calls, that are launched alike though their documents differ, so that one tape does
for all.

Such a pass gathers keys and attends them in one call. What it launches depends on which tokens move
and on how the call is launched. The documents are in tables, which the tape is given. Signals carry
the fingerprint of the pass that runs (:class:`...comm.one_sided.pass_signals.PassSignals`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor

from ...comm import Comm
from ...kernels import Kernel, Pairs
from ...plan import Plan
from ...tape import Tape
from ..call_pairs import gathered_moves, stage_pairs

Alike = tuple[Hashable | None, Sequence[Tensor]]
OTHERS: Alike = None, ()  # no others are known to be alike


def alike(plan: Plan, comm: Comm, kernel: Kernel, given: Any, *, deterministic: bool) -> Alike:
    """What passes with such operands have in common that are launched alike, whatever is in their
    tables; and these tables."""
    moves = gathered_moves(plan, comm.rank) if comm.writes_to_peers else None
    if moves is None:
        return OTHERS
    _, pairs = stage_pairs(plan, comm.rank, 0, False)
    options = {"deterministic": deterministic} if len(given) > 3 else {}
    call, tables = calls_alike(kernel, given, pairs, **options)
    return OTHERS if call is None else ((moves, call), tables)


def calls_alike(kernel: Any, given: Any, pairs: Pairs, **options: Hashable) -> Alike:
    """The same of calls of a kernel, by its ``alike``."""
    found = kernel.alike(given, pairs, **options) if hasattr(kernel, "alike") else None
    return OTHERS if found is None else found


def is_of_all(tape: Tape, comm: Comm | None) -> bool:
    """Whether all that calls of the tape share is memory of the group, if something moves, and
    nothing of one plan or of one call's pairs."""
    return not any(True for _ in tape.constants) if comm is None else comm.owns(tape.constants)
