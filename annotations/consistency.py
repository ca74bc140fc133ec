"""What ranks compare before they act: facts as text by name, gathered over a group.

Ranks that disagree on a shape or a mask exchange messages of different sizes, which ends in a hang
or in wrong numbers. A comparison costs the host a small collective. Ranks on CPUs, where that is
little next to the computation, compare unless ``SEQSHARD_CHECK=0``; ranks on GPUs only with
``SEQSHARD_CHECK=1``, for tests, for debugging and for the first step of a job.

The facts are listed where they are known: for an attention call in ``op/arguments.py`` of
``ring_attention``, for a call of ``parallelize`` in ``plan/rank_agreement.py`` of the torch engine.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Read at each call from what os.environ wraps, because os.environ takes ten times as long.
_ENVIRONMENT: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
_NAME, *_VALUES = (
    os.environ.encodekey(text) if _ENVIRONMENT is not os.environ else text  # type: ignore[attr-defined]
    for text in ("SEQSHARD_CHECK", "", "0", "1")
)
_SETTINGS = dict(zip(_VALUES, (False, False, True), strict=True))


class DisagreementError(ValueError):
    """Ranks of a group called an op with arguments that do not belong together."""


def check_setting() -> bool | None:
    """Whether ``SEQSHARD_CHECK`` asks for comparisons; None if it is not set.

    Raises:
        ValueError: it is neither 0 nor 1.
    """
    value = _ENVIRONMENT.get(_NAME)
    if value is not None and value not in _SETTINGS:
        raise ValueError(f"SEQSHARD_CHECK must be 0 or 1, got {os.environ['SEQSHARD_CHECK']!r}")
    return None if value is None else _SETTINGS[value]


@dataclass(frozen=True)
class Statements:
    """What the ranks of a group said.

    Attributes:
        facts: those of each rank.
        labels: for each rank, text to show before some facts; labels may differ.
        problems: why a rank cannot go on, by rank.
    """

    facts: Sequence[Mapping[str, str]]
    labels: Sequence[Mapping[str, str]]
    problems: Mapping[int, str]

    @classmethod
    def gather(
        cls,
        all_gather: Callable[[Any], Sequence[Any]],
        facts: Mapping[str, str],
        problem: Exception | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Statements:
        """What all ranks say, from what this rank says.

        Args:
            all_gather: takes this rank's object, returns those of all ranks in rank order.
        """
        text = None if problem is None else str(problem)
        every = all_gather((dict(facts), dict(labels or {}), text))
        every_facts, every_labels, problems = zip(*every, strict=True)
        refused = {rank: text for rank, text in enumerate(problems) if text is not None}
        return cls(every_facts, every_labels, refused)

    def refusals(self) -> list[str]:
        """A line for each rank that cannot go on."""
        return [f"rank {rank}: {text}" for rank, text in self.problems.items()]

    def differing(self) -> list[str]:
        """The names of facts that are not the same on all ranks."""
        names = dict.fromkeys(name for facts in self.facts for name in facts)
        return [name for name in names if len({facts.get(name) for facts in self.facts}) > 1]

    def table(self, names: Sequence[str]) -> str:
        """The facts of these names with their labels, a line for each rank."""
        lines = [["rank", *names]]
        for rank, (facts, labels) in enumerate(zip(self.facts, self.labels, strict=True)):
            cells = [" ".join(filter(None, (labels.get(n), facts.get(n)))) or "-" for n in names]
            lines.append([str(rank), *cells])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  " + "  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def described(value: Any) -> str:
    """Shape and dtype of a tensor; any other value as Python writes it."""
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else repr(value)


def digest(value: Any) -> str:
    """Shape, dtype and a hash of a tensor's values; the type of any other value. Copies the tensor
    to the host."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    dense = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # An empty tensor may have any strides, and then its bytes have no view.
    data = dense.reshape(-1).view(torch.uint8).numpy() if dense.numel() else b""
    return f"{described(value)} #{hashlib.sha256(data).hexdigest()[:8]}"
