"""Before each op the ranks of its group compare what they are about to do.

Ranks that disagree on a shape or a mask exchange messages of different sizes, which ends in a hang
or in wrong numbers. The check costs the host a small collective an op. Ranks on CPUs, where that is
little beside the attention, make it unless ``SEQSHARD_CHECK=0``; ranks on GPUs with
``SEQSHARD_CHECK=1``, for tests, for debugging and for the first step of a job.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from ..core.comm import Comm
from ..core.comm.comm_groups import GroupLike, comm_by_name, group_name

# Asked at each call: what lies below os.environ, which takes ten times as long.
_SET: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
_NAME, *_OFF = (
    os.environ.encodekey(text) if _SET is not os.environ else text  # type: ignore[attr-defined]
    for text in ("SEQSHARD_CHECK", "0", "")
)


class DisagreementError(ValueError):
    """Ranks of a group called an op with arguments that do not belong together."""


def enabled(group: GroupLike) -> bool:
    """Whether the ranks of a group compare their calls."""
    said = _SET.get(_NAME)
    if said is not None:
        return said not in _OFF
    return group is not None and comm_by_name(group_name(group)).compares


def agree(
    op: str,
    comm: Comm,
    facts: Mapping[str, str],
    problem: Exception | None,
    called: Mapping[str, str] | None = None,
    hints: Mapping[str, str] | None = None,
) -> None:
    """Compare ``facts`` over the group; every rank raises if any differs or has a problem.

    Args:
        op: title of the op.
        comm: the group; with one rank nothing is compared.
        facts: what must be the same on all ranks, as text by name.
        called: of some facts what to show before them; it may differ.
        hints: of some facts what to add where they differ.
        problem: why this rank cannot go on, or None.
    Raises:
        DisagreementError: a table of who differs, or another rank's problem. A rank with a problem
            of its own is left to raise that itself.
    """
    if comm.size == 1:
        return
    with _disable_current_modes():  # text travels in real tensors, also where others are fake
        text = str(problem) if problem else None
        told = comm.all_gather_object((op, dict(facts), text, dict(called or {})))
    if problem is not None:
        return
    failed = [(rank, text) for rank, (_, _, text, _) in enumerate(told) if text is not None]
    if failed:
        lines = [f"rank {rank}: {text}" for rank, text in failed]
        raise DisagreementError(f"{op}: refused on another rank of the group\n" + "\n".join(lines))
    rows = [{"op": name, **theirs} for name, theirs, _, _ in told]
    columns = sorted({key for row in rows for key in row})
    differing = [c for c in columns if len({row.get(c) for row in rows}) > 1]
    if differing:
        found = [text for name, text in (hints or {}).items() if name in differing]
        names = [names for *_, names in told]
        shown = [
            {key: " ".join(filter(None, (of.get(key), text))) for key, text in row.items()}
            for row, of in zip(rows, names, strict=True)
        ]
        table = _table(shown, differing)
        lines = [f"{op}: the ranks of the group do not agree", table, *found]
        raise DisagreementError("\n".join(lines))


def _table(rows: list[dict[str, str]], columns: list[str]) -> str:
    header = ["rank", *columns]
    body = [[str(rank), *(row.get(c, "-") for c in columns)] for rank, row in enumerate(rows)]
    widths = [max(len(line[n]) for line in [header, *body]) for n in range(len(header))]
    return "\n".join(
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [header, *body]
    )
