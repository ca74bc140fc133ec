"""Checking what a user passes, before anything is computed or sent.

Every rule is stated once here. What does not fit raises :class:`ArgumentError`, also in the other
modules of this package: it names the op, the argument and its shape, and says what would fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from ..core.comm.comm_groups import GroupLike, comm_by_name, group_name
from . import agreement

T = TypeVar("T")


class ArgumentError(ValueError):
    """An argument that an attention op cannot take."""


def require(fits: bool, op: str, name: str, what: str, value: object) -> None:
    """Raise where an argument does not fit."""
    if not fits:
        raise ArgumentError(f"{op}: {name} must be {what}, got {value!r}")


def refuse_unsupported(op: str, **given: object) -> None:
    """Raise for arguments that are part of the signature but not supported yet.

    Raises:
        NotImplementedError: one of ``given`` is set (neither None, False nor 0); names it.
    """
    for name, value in given.items():
        if value is not None and not _is_off(value):
            shown = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(
                f"{op}: {name}={shown} is not supported yet; leave it at its default"
            )


def window_bounds(op: str, window_size: Sequence[int]) -> tuple[int, int]:
    """``window_size`` as (left, right), -1 where unbounded."""
    bounds = tuple(window_size) if isinstance(window_size, Sequence) else ()
    fits = len(bounds) == 2 and all(is_integer(n, -1) for n in bounds)
    what = "(left, right), each a number of tokens or -1 for no bound"
    require(fits, op, "window_size", what, window_size)
    return int(bounds[0]), int(bounds[1])


def window_before(op: str, window: int, process_group: GroupLike) -> tuple[int, int]:
    """A window of so many tokens before a token's own, as (left, right); -1 is unbounded."""

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

    Anything but a switch keeps the group, whose ranks are to hear that it is refused.
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
    """Whether an int or numpy integer, no bool, of at least ``least``, that int64 can hold."""
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
                    "(map, functools.reduce); and import annotations.engines.nnscaler"
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


def checked(
    op: str,
    process_group: GroupLike,
    check: Callable[[], T],
    facts: Callable[[T], Mapping[str, str]] = lambda result: {},
) -> T:
    """``check()``; where ranks compare their calls, one whose check fails makes every rank raise.

    Args:
        facts: from the result to what must be the same on every rank, as text by name.
    Raises:
        Whatever ``check`` raises, or on its peers :class:`~.agreement.DisagreementError`; that on
        all ranks where they differ in ``facts``.
    """
    if torch.compiler.is_compiling() or not agreement.enabled(process_group):
        return check()
    comm = comm_by_name(group_name(process_group))
    try:
        result = check()
    except Exception as problem:  # whatever it is, the peers must not wait for this rank
        agreement.agree(op, comm, {}, problem)
        raise
    agreement.agree(op, comm, facts(result), None)
    return result
