"""From a trial that fails to a small one that fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

from ..core.mask import AttnMask
from .attention_case import Case
from .trial import Trial

MOST_TRIALS = 400  # that one failure may cost
# Fields that a smaller case has as by default, the first ones first. A layout is text for one
# length, so it goes before lengths are changed.
SIMPLER = (
    "options",
    "strided",
    "fused",
    "softcap",
    "alibi",
    "dropout",
    "sink",
    "batch",
    "k_layout",
    "layout",
    "cu_seqlens_k",
    "window",
    "sink_tokens",
    "dtype",
    "causal",
    "seed",
)
DEFAULTS = {f.name: f.default for f in fields(Case)}


def shrunk(
    trial: Trial, failure: str, failure_of: Callable[[Trial], str] = Trial.failure
) -> tuple[Trial, str]:
    """A smaller trial whose failure is of the same kind, and that failure."""
    left = MOST_TRIALS
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(trial):
            if left == 0:
                return trial, failure
            left -= 1
            found = failure_of(smaller)
            if found and kind_of(found) == kind_of(failure):
                trial, failure, progress = smaller, found, True
                break
    return trial, failure


def kind_of(failure: str) -> str:
    """What failures of one cause have in common: the exception's class, or the result's name."""
    return failure.partition(":")[0]


def _smaller(trial: Trial) -> Iterator[Trial]:
    """Trials that are simpler in one thing, the largest steps first. Some may not be valid: they
    fail in another way."""
    case = trial.case
    if not trial.policy:
        yield from (replace(trial, ranks=n) for n in (1, 2, trial.ranks - 1) if 0 < n < trial.ranks)
    for name in SIMPLER:
        if getattr(case, name) != DEFAULTS[name]:
            yield _changed(trial, **{name: DEFAULTS[name]})
    for heads in ((1, 1), (2, 1), (2, 2)):
        if heads < case.heads:
            yield _changed(trial, heads=heads)
    if case.dims != (4, 4):
        yield _changed(trial, dims=(4, 4))
    if case.given is not None:
        yield from (_masked(trial, mask) for mask in _smaller_masks(case.given))
    elif case.packed:
        yield from (_packed(trial, ends) for ends in _fewer_tokens(case.cu_seqlens))
    else:
        some = {case.length // 2, case.length - 1}
        yield from (_changed(trial, length=n) for n in sorted(some) if 0 < n < case.length)


def _changed(trial: Trial, **changes: Any) -> Trial:
    return replace(trial, case=replace(trial.case, **changes))


def _packed(trial: Trial, ends: tuple[int, ...]) -> Trial:
    return _changed(trial, cu_seqlens=ends, cu_seqlens_k=None, length=ends[-1])


def _masked(trial: Trial, mask: AttnMask) -> Trial:
    return _changed(trial, given=mask, length=mask.q_len)


def _fewer_tokens(ends: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Without one document, or with one that is half as long."""
    lengths = [b - a for a, b in pairwise(ends)]
    for n, length in enumerate(lengths):
        for other in ([], [length // 2] if length > 1 else []):
            kept = [*lengths[:n], *other, *lengths[n + 1 :]]
            if kept and kept != lengths:
                sums = [sum(kept[:m]) for m in range(len(kept) + 1)]
                yield tuple(sums)


def _smaller_masks(mask: AttnMask) -> Iterator[AttnMask]:
    """The first half of the rows or keys, or without one slice."""
    rows = mask.slices.tolist()
    for q_len, k_len in ((mask.q_len // 2, mask.k_len), (mask.q_len, mask.k_len // 2)):
        if q_len and k_len and (q_len, k_len) != (mask.q_len, mask.k_len):
            inside = mask.restrict((0, q_len), (0, k_len)).slices
            yield AttnMask.from_slices(inside, q_len, k_len)
    if len(rows) > 1:
        for n in range(len(rows)):
            yield AttnMask.from_slices(rows[:n] + rows[n + 1 :], mask.q_len, mask.k_len)
