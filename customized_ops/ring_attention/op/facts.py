"""What the ranks of a group must have in common in a call, as text: what they compare."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
from torch import Tensor

from ..core.layout import Layout
from ..core.plan import Plan
from .mask_source import Arguments


def facts_of(given: Arguments, plan: Plan | None) -> dict[str, str]:
    """What must be the same on every rank of a group, as text."""
    facts = {name: _without_tokens(given[name]) for name in ("q", "k", "v")}
    facts |= {"dtype": str(given["q"].dtype), "device": given["q"].device.type}
    options = (
        "softmax_scale softcap dropout_p return_lse deterministic reduce_dtype kernel team_size"
    )
    for name in options.split():
        facts[name] = repr(given[name])
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
    if plan is not None:
        mask = plan.mask
        size = f"{mask.q_len}x{mask.k_len} {mask.area} pairs"
        facts["mask"] = f"{size} {_digest(mask.slices)}"
        facts["layout"] = _tables(plan.q_layout, plan.k_layout)
    return facts


def layout_names(plan: Plan | None) -> dict[str, str]:
    """What the layouts are called. A plan made for equal ones may call them otherwise, and a name
    may leave out where two differ, so ranks compare their tables."""
    return {} if plan is None else {"layout": f"{plan.q_layout} {plan.k_layout}"}


def hints_of(given: Arguments) -> dict[str, str]:
    """What a rank may not have thought of, where it and others differ."""
    hints = {
        "dropout_seed": "a seed that is not passed is drawn from torch's generator: seed that "
        "alike on all ranks, or pass dropout_seed="
    }
    if not given["layout"]:
        hints["layout"] = (
            "without layout= each rank takes the others to hold as many tokens as itself; "
            "say what they hold with layout=Layout.from_sizes([...])"
        )
    return hints


@lru_cache(maxsize=64)
def _tables(*layouts: Layout) -> str:
    return " ".join(_digest(layout.table) for layout in layouts)


def _digest(values: np.ndarray) -> str:
    return f"#{hashlib.sha256(values.tobytes()).hexdigest()[:8]}"


def _without_tokens(t: Tensor) -> str:
    """Shape with the sequence dim, which ranks may differ in, as ``*``."""
    shape = list(map(str, t.shape))
    shape[-3] = "*"
    return f"({', '.join(shape)})"
