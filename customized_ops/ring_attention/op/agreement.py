"""Before each op the ranks of its group compare their calls (:mod:`annotations.consistency`)."""

from __future__ import annotations

from collections.abc import Mapping

from torch.utils._python_dispatch import _disable_current_modes

from annotations.consistency import DisagreementError, Statements, check_setting

from ..core.comm import Comm
from ..core.comm.comm_groups import GroupLike, comm_by_name, group_name


def enabled(group: GroupLike) -> bool:
    """Whether the ranks of a group compare their calls."""
    setting = check_setting()
    if setting is not None:
        return setting
    return group is not None and comm_by_name(group_name(group)).compares


def agree(
    op: str,
    comm: Comm,
    facts: Mapping[str, str],
    problem: Exception | None,
    labels: Mapping[str, str] | None = None,
    hints: Mapping[str, str] | None = None,
) -> None:
    """Compare ``facts`` over the group; every rank raises if any differs or has a problem.

    Args:
        op: title of the op.
        comm: the group; with one rank nothing is compared.
        facts: text by name that must be the same on all ranks.
        labels: text to show before some facts; labels may differ.
        hints: text to add to the error if a fact differs, by the fact's name.
        problem: why this rank cannot go on, or None.
    Raises:
        DisagreementError: a table of who differs, or another rank's problem. A rank with a problem
            of its own raises that itself.
    """
    if comm.size == 1:
        return
    with _disable_current_modes():  # text travels in real tensors, also where others are fake
        said = Statements.gather(comm.all_gather_object, {"op": op, **facts}, problem, labels)
    if problem is not None:
        return
    if said.problems:
        lines = [f"{op}: refused on another rank of the group", *said.refusals()]
        raise DisagreementError("\n".join(lines))
    if differing := sorted(said.differing()):
        found = [text for name, text in (hints or {}).items() if name in differing]
        lines = [f"{op}: the ranks of the group do not agree", said.table(differing), *found]
        raise DisagreementError("\n".join(lines))
