"""From a trial that fails to a small one that fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from .trial import Trial

MOST_TRIALS = 400  # for shrinking one failure


def shrunk(
    trial: Trial, failure: str, failure_of: Callable[[Trial], str] = Trial.failure
) -> tuple[Trial, str]:
    """A smaller trial whose failure is of the same kind, and that failure."""
    tried = {str(trial)}
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(trial):
            if str(smaller) in tried:
                continue
            if len(tried) > MOST_TRIALS:
                return trial, failure
            tried.add(str(smaller))
            found = failure_of(smaller)
            if found and kind_of(found) == kind_of(failure):
                trial, failure, progress = smaller, found, True
                break
    return trial, failure


def kind_of(failure: str) -> str:
    """What failures of one cause have in common: the exception's class, or the result's name."""
    return failure.partition(":")[0]


def _smaller(trial: Trial) -> Iterator[Trial]:
    """Trials that are simpler in one respect, the largest steps first. Some may not be valid; those
    fail in another way."""
    if not trial.policy:
        yield from (replace(trial, ranks=n) for n in (1, 2, trial.ranks - 1) if 0 < n < trial.ranks)
    yield from (replace(trial, case=case) for case in trial.case.smaller())
