"""Checks of what a user passes, and what the ranks of a group compare before an op.

Both happen before anything is computed or sent. What does not fit raises :class:`ArgumentError`,
also in the other modules of this package: it names the op, the argument and its shape, and says
what would fit. :func:`agree_on_call` lists what ranks compare of a call, which
:mod:`annotations.consistency` compares. What one of them refuses, or what differs, raises on all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from annotations.consistency import DisagreementError, Statements, check_setting, described

from ..core.comm import Comm
from ..core.comm.comm_groups import GroupLike, comm_by_name, group_name
from ..core.layout import Layout
from ..core.mask import AttnMask
from ..core.mask.slices import UNBOUNDED
from ..core.plan import Plan

T = TypeVar("T")
BY_NAME = "(flash-attn's max_seqlen_q and max_seqlen_k go by name here)"


class ArgumentError(ValueError):
    """An argument that an attention op cannot take."""


def require(fits: bool, op: str, name: str, what: str, value: object) -> None:
    """Raise where an argument does not fit."""
    if not fits:
        raise ArgumentError(f"{op}: {name} must be {what}, got {value!r}")


def refuse_attn_probs(op: str, asked: object) -> None:
    """Raise NotImplementedError where ``return_attn_probs`` is set."""
    if asked is not None and not _is_off(asked):
        shown = "a tensor" if isinstance(asked, Tensor) else repr(asked)
        raise NotImplementedError(
            f"{op}: return_attn_probs={shown} is not supported yet; leave it at its default"
        )


def window_bounds(op: str, window_size: Sequence[int]) -> tuple[int, int]:
    """``window_size`` as (left, right), -1 where unbounded."""
    bounds = tuple(window_size) if isinstance(window_size, Sequence) else ()
    fits = len(bounds) == 2 and all(is_integer(n, -1) for n in bounds)
    what = "(left, right), each a number of tokens or -1 for no bound"
    if isinstance(window_size, bool):  # flash-attn's causal, where two more arguments came before
        what += f" {BY_NAME}"
    require(fits, op, "window_size", what, window_size)
    return int(bounds[0]), int(bounds[1])


def window_before(op: str, window: int, process_group: GroupLike) -> tuple[int, int]:
    """A window of ``window`` tokens before a token's own, as (left, right); -1 is unbounded."""

    def check() -> tuple[int, int]:
        unbounded = is_integer(window, -1) and window == -1
        return (-1 if unbounded else tokens_of(op, "window (-1: unbounded)", window)), 0

    return checked(op, process_group, check)


def flag_of(op: str, name: str, value: bool) -> bool:
    """A switch as a bool; 0, 1 and numpy's bools will do."""
    require(_is_flag(value), op, name, "True or False", value)
    return bool(value)


def ring_group(enable_ring: bool, process_group: GroupLike) -> GroupLike:
    """``process_group``, or None where ``enable_ring`` is off.

    A value that is no switch keeps the group, so that all its ranks learn that it is refused.
    """
    return None if _is_off(enable_ring) else process_group


# Read once: nnscaler's tracer puts stand-ins for these where this module looks them up.
_BOOLS, _INTEGERS = (bool, np.bool_), (int, np.integer)
_isinstance, _type = isinstance, type


def _is_flag(value: object) -> bool:
    return isinstance(value, _BOOLS) or (is_integer(value) and value in (0, 1))


def _is_off(value: object) -> bool:
    return _is_flag(value) and not bool(value)


def is_integer(value: object, least: int = 0) -> bool:
    """Whether ``value`` is an int or numpy integer (no bool), ``least`` or more, within int64."""
    if isinstance(value, _BOOLS) or not isinstance(value, _INTEGERS):
        return False
    return bool(least <= value < 2**63)


def tokens_of(op: str, name: str, count: int) -> int:
    """A number of tokens, 0 or more."""
    require(is_integer(count), op, name, "a number of tokens, 0 or more", count)
    return int(count)


def check_tensors(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """q, k and v must be floating tensors of one dtype, on one device."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not _isinstance(t, Tensor):
            kind = _type(t)
            if kind.__module__.startswith("nnscaler."):
                raise ArgumentError(
                    f"{op}: nnscaler traces into this call, which it does not see as an op. Have "
                    "the model, or a function that it calls, make the call, not compiled code "
                    "(map, functools.reduce)"
                )
            raise ArgumentError(f"{op}: {name} must be a tensor, got {kind.__name__}")
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            raise ArgumentError(f"{op}: {name} is {t.dtype} but q is {q.dtype}; give one dtype")
        if t.device != q.device:
            raise ArgumentError(f"{op}: {name} is on {t.device} but q is on {q.device}")
    if not q.dtype.is_floating_point:
        raise ArgumentError(f"{op}: q, k and v must be floating point, got {q.dtype}")


def check_heads(op: str, q: Tensor, k: Tensor) -> None:
    """Query heads must be a multiple of key heads (the dim before the last)."""
    h, g = int(q.shape[-2]), int(k.shape[-2])
    if (h % g) if g else h:
        raise ArgumentError(
            f"{op}: q has {h} heads and k has {g} (dim {q.ndim - 2} of {tuple(q.shape)} and "
            f"{tuple(k.shape)}); the heads of q must be a multiple of those of k"
        )


def compares_calls(group: GroupLike) -> bool:
    """Whether the ranks of a group compare their calls."""
    setting = check_setting()
    if setting is not None:
        return setting
    return group is not None and comm_by_name(group_name(group)).compares


HINTS = {
    "tokens": "ranks that do not hold equal shares of the tokens say so with "
    "layout=Layout.from_sizes([...]), all of them alike"
}


def checked(
    op: str,
    process_group: GroupLike,
    check: Callable[[], T],
    facts: Callable[[T], Mapping[str, str]] = lambda result: {},
) -> T:
    """Run ``check()``; where ranks compare their calls, a failure on one makes every rank raise.

    Args:
        facts: makes what :func:`agree` compares from the result.
    """
    if torch.compiler.is_compiling() or not compares_calls(process_group):
        return check()
    comm = comm_by_name(group_name(process_group))
    try:
        result = check()
    except Exception as problem:  # whatever it is, the peers must not wait for this rank
        agree(op, comm, {}, problem)
        raise
    agree(op, comm, facts(result), hints=HINTS)
    return result


def agree(
    op: str,
    comm: Comm,
    facts: Mapping[str, str],
    problem: Exception | None = None,
    labels: Mapping[str, str] | None = None,
    hints: Mapping[str, str] | None = None,
) -> None:
    """Compare ``facts`` over the group; every rank raises if any differs or has a problem.

    Args:
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
    # Text travels in real tensors, also where others are fake.
    with comm.doing(f"{op}, where ranks compare their calls"), _disable_current_modes():
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


def agree_on_call(
    op: str,
    comm: Comm,
    qkv: Sequence[Any],
    options: Mapping[str, Any],
    optional: Sequence[Tensor | None],
    plan: Plan,
) -> None:
    """Compare a call over the group, as :func:`agree` does; of q, k, v: shape, dtype and device."""
    facts = {name: _without_tokens(t.shape) for name, t in zip("qkv", qkv, strict=True)}
    facts |= {"dtype": str(qkv[0].dtype), "device": qkv[0].device.type}
    facts |= {name: repr(options[name]) for name in SAME_OPTIONS}
    # Ranks share the tokens of a sequence, so they must hold the same part of its heads.
    for kind in ("row", "head"):
        part, parts = options[f"{kind}_part"], options[f"{kind}_parts"]
        facts[f"q_{kind}s"] = f"part {part} of {parts}" if parts else "None"
    if options["head_parts"]:
        facts["q_heads"] += f" of {options['head_total']} heads"
    slopes, sink, seed = optional
    facts["sink"] = described(sink)
    facts["alibi_slopes"] = "None"
    if slopes is not None:
        digest = _digest(slopes.detach().double().cpu().numpy())
        facts["alibi_slopes"] = f"{tuple(slopes.shape)} {slopes.dtype} {digest}"
    if seed is not None:
        facts["dropout_seed"] = str(seed.tolist())
    mask, layouts = plan.mask, (plan.q_layout, plan.k_layout)
    facts["mask"] = f"{mask.q_len}x{mask.k_len} {mask.area} pairs {_digest(mask.slices)}"
    facts["layout"] = _tables(*layouts)
    # A plan made for equal layouts may name them differently, and a name may omit what differs
    # between two, so ranks compare the tables of layouts and only show the names.
    labels = {"layout": " ".join(map(str, layouts)), "mask": _first(mask)}
    hints = {
        "dropout_seed": "a seed that is not passed is drawn from torch's generator: seed that "
        "alike on all ranks, or pass dropout_seed="
    }
    if not options["layout"]:
        hints["layout"] = (
            "without layout= each rank takes the others to hold as many tokens as itself; "
            "say what they hold with layout=Layout.from_sizes([...])"
        )
    agree(op, comm, facts, None, labels, hints)


@lru_cache(maxsize=64)
def _tables(*layouts: Layout) -> str:
    return " ".join(_digest(layout.table) for layout in layouts)


def _first(mask: AttnMask, most: int = 3) -> str:
    """The first slices of a mask, from which a reader sees which argument differs."""
    said = []
    for q0, q1, k0, k1, low, high in mask.slices[:most].tolist():
        ends = ["" if abs(end) >= UNBOUNDED else str(end) for end in (low, high)]
        said.append(f"rows {q0}:{q1} keys {k0}:{k1} band {'..'.join(ends)}")
    return "; ".join(said) + (", ..." if len(mask.slices) > most else "")


def _digest(values: np.ndarray) -> str:
    return f"#{hashlib.sha256(values.tobytes()).hexdigest()[:8]}"


def _without_tokens(shape: Sequence[int]) -> str:
    """A shape as text, with ``*`` for the tokens: ranks may hold different numbers of them."""
    sizes = list(map(str, shape))
    sizes[-3] = "*"
    return f"({', '.join(sizes)})"
