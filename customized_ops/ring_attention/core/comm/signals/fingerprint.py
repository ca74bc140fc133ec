"""What ranks must agree on in a pass, in the 64 bits of a signal.

A flag that says "arrived" could be any number but 0, so it is the sender's fingerprint of its pass.
The receiver, which waits for the flag anyway, compares it with its own. Each part has 16 bits, so
that two fingerprints tell which part differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from ...plan.plan_value import PlanValue

PARTS = (
    "the mask or the documents",
    "the layouts",
    "how the plan shares out the work",
    "tensors or options",
)
PART_BITS = 16
OF_TABLES = ("fingerprint",)  # the key of the first three, in what is known of a plan
NO_CALL = 1  # the fingerprint of signals between passes
OTHER_CALLS = "do not make the same calls in the same order"


class Meeting(NamedTuple):
    """What a rank was doing when all met.

    Attributes:
        call: the fingerprint of a pass; NO_CALL for anything else.
    """

    what: str
    call: int = NO_CALL


def fingerprint(plan: PlanValue, *call: object) -> int:
    """The fingerprint, int64 and not 0, of a pass over ``plan``. ``call`` is what else ranks must
    agree on, as values whose text is the same on all of them."""
    if OF_TABLES not in plan.made:
        mask, layouts = plan.mask, (plan.q_layout.table, plan.k_layout.table)
        how = plan.team_size, plan.steps, plan.head_groups, plan.held_keys
        shares = *how, plan.few_senders, plan.rounded
        of_mask = mask.slices, (mask.q_len, mask.k_len)
        plan.made[OF_TABLES] = of_tables(of_mask, layouts, (plan.work, shares))
    return of_call(plan.made[OF_TABLES], *call)


def over_plan(plan: PlanValue, call: int) -> int:
    """The fingerprint of a pass over ``plan`` that is otherwise like that with fingerprint
    ``call``."""
    fingerprint(plan)
    return _whole(plan.made[OF_TABLES], call)


def of_tables(
    mask: Sequence[npt.ArrayLike],
    layouts: Sequence[npt.ArrayLike],
    shares: Sequence[npt.ArrayLike] = (),
) -> int:
    """The fingerprint of a pass without the last of PARTS, from tables of integers."""
    return _joined([_sum(*tables) for tables in (mask, layouts, shares)])


def of_call(tables: int, *call: object) -> int:
    """A whole fingerprint, from :func:`of_tables` and what else ranks must agree on."""
    return _whole(tables, crc32(repr(call).encode()))


def _whole(tables: int, call: int) -> int:
    """A fingerprint whose last part is that of ``call``."""
    value = tables << PART_BITS | _part(call)
    return (value if value < 1 << 63 else value - (1 << 64)) or NO_CALL


def differing(one: int, other: int) -> list[str]:
    """The PARTS in which two fingerprints differ."""
    at = reversed(range(len(PARTS)))
    return [
        part
        for part, n in zip(PARTS, at, strict=True)
        if _part(one >> n * PART_BITS) != _part(other >> n * PART_BITS)
    ]


def disagreement(peer: int, call: int, theirs: int) -> str:
    """What is wrong where a peer is in another pass."""
    if NO_CALL in (call, theirs):
        return f" and rank {peer} {OTHER_CALLS}"
    return f" and rank {peer} do not agree on " + " and ".join(differing(call, theirs))


def other_meeting(peer: int, here: Meeting, theirs: Meeting) -> str:
    """What is wrong where a peer was doing something else when all met; "" if it was not."""
    if here.what != theirs.what:
        return f" and rank {peer} {OTHER_CALLS}: it waits in {theirs.what}, not in {here.what}"
    if here.call == theirs.call or NO_CALL in (here.call, theirs.call):
        return ""
    return disagreement(peer, here.call, theirs.call)


def _sum(*tables: npt.ArrayLike) -> int:
    total = 0
    for table in tables:
        total = crc32(np.ascontiguousarray(table, dtype=np.int64).tobytes(), total)
    return total


def _part(value: int) -> int:
    return value & (1 << PART_BITS) - 1


def _joined(values: list[int]) -> int:
    joined = 0
    for value in values:
        joined = joined << PART_BITS | _part(value)
    return joined
