"""Attention calls that are alike again and again, as of the layers and steps of a training.

    the first    is checked, bound and planned, and goes through torch's dispatcher
    the next     are one look-up of all that was passed, and the executor

Only plain calls: without ALiBi, sinks and dropout, and with nobody looking on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from annotations.library.autograd import Repeat
from annotations.library.cached_calls import alike, remembered

from ..core.comm import Comm
from ..core.comm.comm_groups import GroupLike, comm_by_name, group_name
from . import te_cp
from .arguments import Options
from .attention_call import MOST_RESOLVED, Call, backward, forward


class Pattern(NamedTuple):
    """How a user said which pairs attend.

    Attributes:
        said: what was passed, but for tensors.
        numbers: checks ``said``, and makes the family's numbers of nothing else.
        tensors: checks and returns the family's integer tensors.
        values: what these hold, with a hash; None where that is not at hand.
    """

    said: tuple[Any, ...]
    numbers: Callable[[], Mapping[str, Any]]
    tensors: Callable[[], Mapping[str, Tensor]] = dict
    values: Callable[[], tuple[Any, ...] | None] = tuple


class Known(NamedTuple):
    """A call that was made before.

    Attributes:
        tensors: the family's, of no other memory; None for those that each call brings.
    """

    repeat: Repeat
    tensors: tuple[Tensor, ...] | None


# By call and by group: what was found goes with the group.
_known: dict[Any, WeakKeyDictionary[Comm, Known]] = {}


def key_of(
    op: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    options: Options,
    unsupported: Mapping[str, object],
) -> Any:
    """All that was passed, tensors by shape and dtype; None for a call that is not plain."""
    if not _is_plain(options):
        return None
    values = pattern.values()
    if values is None:
        return None
    return (
        op,
        q.shape,
        k.shape,
        v.shape,
        q.dtype,
        k.dtype,
        v.dtype,
        q.device,
        k.device,
        v.device,
        values,
        alike((*options.said, *pattern.said, *unsupported.values())),
        torch.are_deterministic_algorithms_enabled(),
    )


def _is_plain(options: Options) -> bool:
    if options.alibi_slopes is not None or options.sink is not None:
        return False
    if options.dropout_seed is not None or options.q_heads is not None:
        return False
    if type(options.dropout_p) not in (int, float) or options.dropout_p:
        return False
    # TransformerEngine's own context parallelism keeps its group, which must not be kept here.
    return type(options.kernel) is str and options.kernel not in te_cp.COMMS


def find(key: Any, process_group: GroupLike) -> Known | None:
    """What is known of a call of this key, on this group."""
    try:
        known = _known.get(key)
    except TypeError:  # something in it has no hash, which the checks will tell
        return None
    return None if known is None else known.get(comm_by_name(group_name(process_group)))


def note(key: Any, comm: Comm, repeat: Repeat, tensors: Sequence[Tensor]) -> None:
    """Remember a call that went well.

    Args:
        tensors: the family's, as the op was given them.
    """
    here = all(t.device.type == "cpu" for t in tensors)  # then they are copies, or constants
    known = remembered(_known, key, WeakKeyDictionary, MOST_RESOLVED)
    known[comm] = Known(repeat, tuple(tensors) if here else None)


def repeat_of(call: Call, comm: Comm, numbers: Sequence[Any], packed: bool) -> Repeat:
    """What an op does in calls like this one: no checks, no look-up.

    Args:
        numbers: the op's arguments that are no tensors, its group last.
    """
    scoring, group, held = call.scoring, numbers[-1], weakref.ref(comm)
    assert scoring is not None, "the scoring of one call has tensors, which are not another's"

    def here() -> Comm:
        return held() or comm_by_name(group)

    def run(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return forward(call, here(), q, k, v, scoring, None, packed)

    def run_backward(
        dout: Any, dlse: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any
    ) -> tuple[Tensor | None, ...]:
        *_, out, lse = rest
        grads = backward(call, here(), dout, dlse, q, k, v, out, lse, scoring, None, packed)
        return tuple([None if grad is None else grad.contiguous() for grad in grads])

    return Repeat(list(numbers), run, run_backward)
