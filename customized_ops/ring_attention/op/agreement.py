"""Before each op the ranks of its group compare their calls (:mod:`annotations.consistency`)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from annotations.consistency import DisagreementError, Statements, check_setting

from ..core.comm import Comm
from ..core.comm.comm_groups import GroupLike, comm_by_name, group_name
from ..core.layout import Layout
from ..core.plan import Plan

SAME_OPTIONS = (
    "softmax_scale",
    "softcap",
    "dropout_p",
    "return_lse",
    "deterministic",
    "reduce_dtype",
    "kernel",
    "team_size",
)


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


def agree_on_call(
    op: str, comm: Comm, given: Mapping[str, Any], plan: Plan | None, problem: Exception | None
) -> None:
    """Compare a call over the group, as :func:`agree`.

    Args:
        given: the op's arguments by name.
        plan: what this rank planned; None if it has a problem.
    """
    facts, labels = _facts_of(given), {}
    if plan is not None:
        mask, layouts = plan.mask, (plan.q_layout, plan.k_layout)
        facts["mask"] = f"{mask.q_len}x{mask.k_len} {mask.area} pairs {_digest(mask.slices)}"
        facts["layout"] = _tables(*layouts)
        # A plan made for equal layouts may call them otherwise, and a name may leave out where two
        # differ, so ranks compare their tables and only show the names.
        labels["layout"] = " ".join(map(str, layouts))
    hints = {
        "dropout_seed": "a seed that is not passed is drawn from torch's generator: seed that "
        "alike on all ranks, or pass dropout_seed="
    }
    if not given["layout"]:
        hints["layout"] = (
            "without layout= each rank takes the others to hold as many tokens as itself; "
            "say what they hold with layout=Layout.from_sizes([...])"
        )
    agree(op, comm, facts, problem, labels, hints)


def _facts_of(given: Mapping[str, Any]) -> dict[str, str]:
    """What the arguments of all ranks must have in common, as text."""
    facts = {name: _without_tokens(given[name]) for name in ("q", "k", "v")}
    facts |= {"dtype": str(given["q"].dtype), "device": given["q"].device.type}
    facts |= {name: repr(given[name]) for name in SAME_OPTIONS}
    # Ranks share the tokens of a sequence, so they must hold the same part of its heads.
    for kind in ("row", "head"):
        part, parts = given[f"{kind}_part"], given[f"{kind}_parts"]
        facts[f"q_{kind}s"] = f"part {part} of {parts}" if parts else "None"
    if given["head_parts"]:
        facts["q_heads"] += f" of {given['head_total']} heads"
    slopes, sink = given["alibi_slopes"], given["sink"]
    facts["sink"] = "None" if sink is None else f"{tuple(sink.shape)} {sink.dtype}"
    facts["alibi_slopes"] = "None"
    if slopes is not None:
        digest = _digest(slopes.detach().double().cpu().numpy())
        facts["alibi_slopes"] = f"{tuple(slopes.shape)} {slopes.dtype} {digest}"
    if given["dropout_seed"] is not None:
        facts["dropout_seed"] = str(given["dropout_seed"].tolist())
    return facts


@lru_cache(maxsize=64)
def _tables(*layouts: Layout) -> str:
    return " ".join(_digest(layout.table) for layout in layouts)


def _digest(values: np.ndarray) -> str:
    return f"#{hashlib.sha256(values.tobytes()).hexdigest()[:8]}"


def _without_tokens(t: Tensor) -> str:
    """The shape, with ``*`` for the tokens, of which ranks may hold different numbers."""
    shape = list(map(str, t.shape))
    shape[-3] = "*"
    return f"({', '.join(shape)})"
