"""Passes that came often are given to the device from a tape (:mod:`..tape`), without the Python
that worked them out.

A pass of a rank is one tape where ranks write to one another's memory, and where it has no peers.
Where messages go through NCCL, which does not tell what it launches, each call of the kernel is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..comm import Comm
from ..comm.messages import Moved
from ..kernels import BackwardOperands, ForwardOperands, Kernel, Pairs, Scoring, Tokens
from ..kernels.protocol.kernel import Grads, OutLse
from ..plan import Plan
from ..tape import Tape, record, recording
from .side_stream import keeping_stream

CHOICE = "SEQSHARD_REPLAY"  # the environment variable: 0 for no tapes
# Recording takes the host as long as some ten passes, so it must pay: where lengths change, a batch
# is attended by as many calls as a model has layers.
SEEN_BEFORE = 10
# Of the tensors that a pass is given, from which on it is not recorded: it is so long that it hides
# what the host does.
LARGE_BYTES = 512 << 20
MOST_KEPT = 32  # tapes of one plan, or one call

Results = TypeVar("Results", OutLse, Grads)
Given = Sequence[Tensor | None]


class Recorded(NamedTuple):
    """A pass, or a kernel's call, and what a pass does to its rank's Comm."""

    tape: Tape
    moved: Moved | None


# How often each call came, by all that matters but its plan; then its tape, or None where it cannot
# be recorded.
Known = dict[Hashable, "int | Recorded | None"]
_of_pairs: WeakKeyDictionary[Pairs, Known] = WeakKeyDictionary()
_of_plans: WeakKeyDictionary[Comm, WeakKeyDictionary[Plan, Known]] = WeakKeyDictionary()


def replayed_pass(
    run: Callable[[], Results],
    plan: Plan,
    comm: Comm,
    kernel: Kernel,
    scoring: Scoring,
    given: Given,
    *options: Hashable,
) -> Results:
    """``run()``, a pass of ``given`` over a plan with these options, or its tape."""
    state = comm.replay_state()
    if state is None or not _can_be_recorded(kernel, scoring):
        return run()
    plans = _of_plans.get(comm)
    if plans is None:
        plans = _of_plans[comm] = WeakKeyDictionary()
    key = state, *options, *_key(kernel, scoring, given)
    return _from_tape(plans.setdefault(plan, {}), key, kernel, given, run, comm)


def kernel_forward(
    kernel: Kernel,
    given: ForwardOperands,
    pairs: Pairs,
    scoring: Scoring,
    tokens: Tokens | None = None,
) -> OutLse:
    """:meth:`.protocol.Kernel.forward`."""
    run = partial(kernel.forward, given, pairs, scoring, tokens)
    return _replayed_call(run, pairs, kernel, scoring, given)


def kernel_backward(
    kernel: Kernel,
    given: BackwardOperands,
    pairs: Pairs,
    scoring: Scoring,
    tokens: Tokens | None = None,
    *,
    deterministic: bool,
) -> Grads:
    """:meth:`.protocol.Kernel.backward`."""
    run = partial(kernel.backward, given, pairs, scoring, tokens, deterministic=deterministic)
    return _replayed_call(run, pairs, kernel, scoring, given, deterministic)


def _replayed_call(
    run: Callable[[], Results],
    pairs: Pairs,
    kernel: Kernel,
    scoring: Scoring,
    given: Given,
    *options: Hashable,
) -> Results:
    if recording() or not _can_be_recorded(kernel, scoring):
        return run()
    key = *options, *_key(kernel, scoring, given)
    return _from_tape(_of_pairs.setdefault(pairs, {}), key, kernel, given, run)


_ENABLED = os.environ.get(CHOICE, "1") != "0"


def _can_be_recorded(kernel: Kernel, scoring: Scoring) -> bool:
    return _ENABLED and hasattr(kernel, "watched") and not scoring.needs_tokens


def _key(kernel: Kernel, scoring: Scoring, given: Given) -> list[Hashable]:
    """All that matters of a call but the data of its tensors: their strides, where their memory
    starts as far as copies of 16 bytes mind, and the stream."""
    key: list[Hashable] = [kernel.NAME, scoring.softmax_scale, scoring.softcap, _stream(given)]
    for t in given:
        if t is None:
            key.append(None)
        else:
            key += t.shape, t.stride(), t.dtype, t.data_ptr() % 16
    return key


def _stream(given: Given) -> Any:
    """The current one of the tensors' device, and the current device."""
    device = _device(given)
    if device.type != "cuda":
        return device
    return torch._C._cuda_getCurrentRawStream(device.index), torch._C._cuda_getDevice()


def _device(given: Given) -> torch.device:
    return next(t.device for t in given if t is not None)


def _from_tape(
    known: Known,
    key: Hashable,
    kernel: Any,
    given: Given,
    run: Callable[[], Results],
    comm: Comm | None = None,
) -> Results:
    """What ``run`` returns; recorded, if it came often enough, and then from its tape."""
    found = known.get(key, 0)
    if type(found) is Recorded:
        # A tape changes streams without the contexts that a pass has, so an error would leave it in
        # the second one.
        replay = partial(keeping_stream, _device(given), partial(found.tape.run, given))
        results: Any = replay() if comm is None else comm.replay(found.moved, replay)
        return results  # type: ignore[no-any-return]
    if found is None or (not found and len(known) >= MOST_KEPT):
        return run()
    assert type(found) is int
    if found < SEEN_BEFORE or _capturing(given):
        known[key] = found + 1
        return run()
    known[key] = None
    if sum(t.nbytes for t in given if t is not None) > LARGE_BYTES:
        return run()
    before = None if comm is None else comm.moved()
    with kernel.watched():
        results, tape = record(run, given)
    if tape is not None:
        moved = None if comm is None or before is None else comm.moved().since(before)
        known[key] = Recorded(tape, moved)
    return results


def _capturing(given: Given) -> bool:
    """Whether a CUDA graph is being captured."""
    return _device(given).type == "cuda" and torch.cuda.is_current_stream_capturing()
