"""Passes that came often are replayed from a tape (:mod:`...tape`), without the Python that worked
out what to launch.

A rank's pass is one tape. Messages between ranks are sent anew in each replay. Passes without a
tape still replay the tapes of their kernel calls. One of these does for all calls that are launched
alike, whatever their documents.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from annotations.waiting import tell

from ...comm import Comm
from ...comm.signals.fingerprint import over_plan
from ...kernels import BackwardOperands, ForwardOperands, Kernel, Pairs, Scoring, Tokens
from ...kernels.protocol.kernel import Grads, OutLse
from ...plan import Plan
from ...tape import Tape, record, recording, run_tape
from ..side_stream import keeping_stream
from .call_key import device_of, key_of
from .graphs import Graphs, of_tape
from .passes_alike import Alike, alike, calls_alike, is_of_all
from .seen_before import Kinds, Seen, SeenBefore

# An environment variable: 0 turns tapes off, "tapes" turns CUDA graphs off, and 1 also records
# kernels whose tapes were not compared with their calls.
CHOICE = "SEQSHARD_REPLAY"
# Bytes of the tensors that a pass is given, from which on it is not recorded: its kernels take so
# long that they hide what the host does.
LARGE_BYTES = 512 << 20

Results = TypeVar("Results", OutLse, Grads)
Given = Sequence[Tensor | None]


_of_pairs: SeenBefore[Pairs] = SeenBefore()  # calls of a kernel
_call_kinds = Kinds()
_of_plans: SeenBefore[Plan] = SeenBefore()  # passes in which nothing moves


class OfComm:
    """Passes in which something moves, of one Comm in one state: their tapes refer to memory of
    that state."""

    def __init__(self, state: Hashable) -> None:
        self.state, self.plans, self.kinds = state, SeenBefore[Plan](), Kinds()


_of_comms: WeakKeyDictionary[Comm, OfComm] = WeakKeyDictionary()


def replayed_pass(
    run: Callable[[], Results],
    plan: Plan,
    comm: Comm,
    kernel: Kernel,
    scoring: Scoring,
    given: Given,
    *options: Hashable,
    deterministic: bool = False,
) -> Results:
    """``run()``, a pass of ``given`` over a plan with these options, or its tape."""
    if not _can_be_recorded(kernel, scoring):
        return run()
    key = comm.rank, *options, deterministic, *key_of(kernel, scoring, given)
    if not (plan.rows_move or plan.keys_move):
        return _from_tape(_of_plans, plan, key, kernel, given, run)
    state = comm.replay_state()
    if state is None:
        return run()
    known = _of_comms.get(comm)
    if known is None or known.state != state:
        known = _of_comms[comm] = OfComm(state)

    def new() -> Seen:
        found = alike(plan, comm, kernel, given, deterministic=deterministic)
        return _new(known.kinds, found, key)

    return _from_tape(known.plans, plan, key, kernel, given, run, comm, new)


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
    return _replayed_call(run, pairs, kernel, scoring, given, deterministic=deterministic)


def _replayed_call(
    run: Callable[[], Results],
    pairs: Pairs,
    kernel: Kernel,
    scoring: Scoring,
    given: Given,
    **options: Hashable,
) -> Results:
    if not _can_be_recorded(kernel, scoring):
        return run()
    key = *options.values(), *key_of(kernel, scoring, given)

    find = partial(calls_alike, kernel, given, pairs, **options)
    if not recording():
        new = lambda: _new(_call_kinds, find(), key)  # noqa: E731
        return _from_tape(_of_pairs, pairs, key, kernel, given, run, new=new)
    # Nothing is counted: the pass's own tape takes the place of this call from now on.
    kind, tables = find()
    known = _call_kinds.get((kind, key))
    if known is None or not isinstance(known.tape, Tape):
        return run()
    results: Any = run_tape(known.tape, tuple(given) + tuple(tables))
    return results  # type: ignore[no-any-return]


def _new(kinds: Kinds, found: Alike, key: Hashable) -> Seen:
    """A pass, or a call, that came for the first time: it may be of a kind."""
    seen, (kind, tables) = Seen(), found
    if kind is not None:
        seen.kind, seen.tables = kinds.of((kind, key)), tables
    return seen


def _chosen() -> str:
    """What the environment variable says; "" if it is not set.

    Raises:
        ValueError: it has another value than those of :data:`CHOICE`.
    """
    value = os.environ.get(CHOICE, "")
    if value not in ("", "0", "1", "tapes"):
        raise ValueError(f"{CHOICE} must be 0, 1 or tapes, got {value!r}")
    return value


_enabled = _chosen() != "0"


@contextmanager
def replay(enabled: bool) -> Iterator[None]:
    """A context that turns replays of attention on or off, in the whole process. By default they
    are on, unless ``SEQSHARD_REPLAY`` is 0; ``SEQSHARD_REPLAY=tapes`` replays without CUDA graphs.
    Results are the same. Ranks may differ in this."""
    global _enabled
    before, _enabled = _enabled, enabled
    try:
        yield
    finally:
        _enabled = before


def _can_be_recorded(kernel: Kernel, scoring: Scoring) -> bool:
    if not _enabled or scoring.needs_tokens or not hasattr(kernel, "watched"):
        return False
    return _proven(kernel) or _chosen() == "1"


_checked: dict[str, bool] = {}  # by name of a kernel


def _proven(kernel: Any) -> bool:
    """Whether tapes of this kernel were compared with calls of its library."""
    if kernel.NAME not in _checked:
        reason = kernel.unproven_tapes()
        _checked[kernel.NAME] = reason is None
        if reason is not None:
            tell(
                f"seqshard: calls are not replayed: {reason}; {CHOICE}=1 replays them all the same"
            )
    return _checked[kernel.NAME]


def _capturing(device: torch.device) -> bool:
    """Whether the program captures a CUDA graph. It may outlive a tape, and what the tape reads."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _from_tape(
    among: SeenBefore[Any],
    which: Any,
    key: Hashable,
    kernel: Any,
    given: Given,
    run: Callable[[], Results],
    comm: Comm | None = None,
    new: Callable[[], Seen] = Seen,
) -> Results:
    """``run()``, or the same from its tape; a call that came often enough is recorded.

    Args:
        comm: of a pass in which something moves.
        new: what is known of a pass, or a call, that came for the first time.
    """
    if _capturing(device_of(given)):
        return run()
    known = among.of(which)
    seen = known.of(key, new)
    read = tuple(given) + tuple(seen.tables)
    _take_over(seen, which, read, comm)
    if seen.tape is not None:
        # A tape changes streams without the contexts that a pass has, so after an error the second
        # stream would stay current.
        replay = partial(keeping_stream, device_of(given), partial(seen.tape.run, read))
        results: Any = (
            replay() if seen.moved is None or comm is None else comm.replay(seen.moved, replay)
        )
        return results  # type: ignore[no-any-return]
    kind = seen.kind
    asked = (kind,) if kind is not None and kind.failed else (seen, kind)
    due = [each for each in asked if each is not None and each.is_due()]
    if not due or sum(t.nbytes for t in given if t is not None) > LARGE_BYTES:
        return run()
    if not any([each.is_recorded(among) for each in due]):
        return run()
    before = None if comm is None else comm.moved()
    with kernel.watched():
        results, tape = record(run, read)
    if comm is not None and comm.replay_state() is None:
        tape = None  # its memory is replaced before the next pass
    if comm is not None and before is not None:
        seen.moved = comm.moved().since(before)
    if kind is not None and tape is not None and is_of_all(tape, comm):
        kind.moved, kind.tape = seen.moved, tape  # in this order, for other threads
    if kind is not None:
        kind.failed = tape is None
    seen.tape = tape
    if tape is not None and among is not _of_pairs:
        seen.tape = _replays(tape, read, comm, is_new=seen.times == 1)
    return results


def _take_over(seen: Seen, which: Any, given: Given, comm: Comm | None) -> None:
    """Let a pass, or a call, without a tape have that of those that are launched alike, if there is
    one; ``which``: its plan, or its pairs."""
    kind = seen.kind
    if seen.tape is None and kind is not None and isinstance(kind.tape, Tape):
        tape: Tape | Graphs = kind.tape
        if kind.moved is not None:
            seen.moved = kind.moved._replace(call=over_plan(which, kind.moved.call))
            tape = _replays(kind.tape, given, comm, is_new=True)
        seen.tape = tape


def _replays(tape: Tape, given: Given, comm: Comm | None, *, is_new: bool) -> Tape | Graphs:
    """What replays a pass: graphs, but not if it sends messages, which are sent anew. Calls of a
    kernel never are graphs, as they are only a few launches."""
    may_be_graphs = _chosen() != "tapes" and (comm is None or comm.writes_to_peers)
    return of_tape(tape, given, is_new=is_new) if may_be_graphs else tape
