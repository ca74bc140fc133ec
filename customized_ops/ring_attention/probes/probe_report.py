"""What probes found: a verdict for each check, with the likely cause of a failure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["passed", "failed", "left out"]


class ProbeError(AssertionError):
    """A parallel model differs from the model alone; the text is the whole report."""


@dataclass(frozen=True)
class Check:
    """One line of a report.

    Attributes:
        name: one of ``runs``, ``tokens``, ``values``, ``loss``, ``gradients``, ``influence``,
            ``mask``, ``labels``.
        verdict: ``left out`` if the check was not asked for, or cannot be made because an earlier
            one failed.
        found: what was compared, or what is wrong: rank, position, found and expected.
        cause: the likely cause of a failure; empty otherwise.
    """

    name: str
    verdict: Verdict
    found: str
    cause: str = ""


@dataclass(frozen=True)
class ProbeReport:
    """All checks of a parallel model, the same on every rank; prints as a table."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.verdict == "failed")

    def __getitem__(self, name: str) -> Check:
        """The check of this name; KeyError if there is none."""
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(name)

    def __str__(self) -> str:
        width = max(len(check.name) for check in self.checks)
        lines = [f"parallel model: {'passed' if self.passed else 'FAILED'}"]
        for check in self.checks:
            lines.append(f"  {check.name:<{width}}  {check.verdict:<8}  {check.found}")
            if check.cause:
                lines.append(f"  {'':<{width}}  {'':<8}  likely: {check.cause}")
        return "\n".join(lines)

    def raise_if_failed(self) -> None:
        """Raise :class:`ProbeError` with the whole table if a check failed."""
        if not self.passed:
            raise ProbeError(str(self))
