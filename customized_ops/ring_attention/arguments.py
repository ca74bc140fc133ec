"""Checking what a user passes, before anything is computed or sent.

Every rule is stated once here. An error names the op, the argument and its shape, and says what
would fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from . import agreement
from .core.groups import GroupLike, comm_by_name, group_name
from .core.layout import Layout

T = TypeVar("T")


class ArgumentError(ValueError):
    """An argument that an attention op cannot take."""


def refuse_unsupported(op: str, **given: object) -> None:
    """Raise for arguments that are part of the signature but not supported yet.

    Raises:
        NotImplementedError: one of ``given`` is set (neither None, False nor 0); names it.
    """
    for name, value in given.items():
        tensor = isinstance(value, Tensor)
        if tensor or (value is not None and value != 0):
            shown = "a tensor" if tensor else repr(value)
            raise NotImplementedError(
                f"{op}: {name}={shown} is not supported yet; leave it at its default"
            )


def window_bounds(op: str, window_size: Sequence[int]) -> tuple[int, int]:
    """``window_size`` as (left, right), -1 where unbounded.

    Raises:
        ArgumentError: not two integers of -1 or more.
    """
    bounds = tuple(window_size) if isinstance(window_size, Sequence) else ()
    if len(bounds) != 2 or not all(isinstance(n, int) and n >= -1 for n in bounds):
        raise ArgumentError(
            f"{op}: window_size must be (left, right), each a number of tokens or -1 for no bound, "
            f"got {window_size!r}"
        )
    return bounds[0], bounds[1]


def scale_of(op: str, softmax_scale: float | None, q: Tensor) -> float:
    """The softmax scale; 1 / sqrt(head dim) if None.

    Raises:
        ArgumentError: not a number.
    """
    if softmax_scale is None:
        return float(q.shape[-1] ** -0.5)
    try:
        return float(softmax_scale)
    except (TypeError, ValueError):
        raise ArgumentError(
            f"{op}: softmax_scale must be a number or None, got {softmax_scale!r}"
        ) from None


def causal_of(op: str, causal: bool) -> bool:
    """``causal`` as a bool; 0 and 1 will do.

    Raises:
        ArgumentError: something else, which might mean anything.
    """
    if causal not in (True, False):
        raise ArgumentError(f"{op}: causal must be True or False, got {causal!r}")
    return bool(causal)


def spec_of(op: str, layout: Layout | None) -> str:
    """The layout as an op argument; ``""`` if None.

    Raises:
        ArgumentError: not a Layout.
    """
    if layout is not None and not isinstance(layout, Layout):
        raise ArgumentError(f"{op}: layout must be a Layout or None, got {layout!r}")
    return "" if layout is None else layout.spec


def check_tensors(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """q, k and v must be floating tensors of one dtype, on one device.

    Raises:
        ArgumentError: they are not.
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, Tensor):
            raise ArgumentError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            raise ArgumentError(f"{op}: {name} is {t.dtype} but q is {q.dtype}; give one dtype")
        if t.device != q.device:
            raise ArgumentError(f"{op}: {name} is on {t.device} but q is on {q.device}")
    if not q.dtype.is_floating_point:
        raise ArgumentError(f"{op}: q, k and v must be floating point, got {q.dtype}")


def check_heads(op: str, q: Tensor, k: Tensor) -> None:
    """Query heads must be a multiple of key heads (the dim before the last).

    Raises:
        ArgumentError: they are not.
    """
    h, g = int(q.shape[-2]), int(k.shape[-2])
    if (h % g) if g else h:
        raise ArgumentError(
            f"{op}: q has {h} heads and k has {g} (dim {q.ndim - 2} of {tuple(q.shape)} and "
            f"{tuple(k.shape)}); the heads of q must be a multiple of those of k"
        )


def checked(op: str, process_group: GroupLike, check: Callable[[], T]) -> T:
    """``check()``; with ``SEQSHARD_CHECK=1`` a rank whose check fails makes every rank raise.

    Raises:
        Whatever ``check`` raises, or on its peers :class:`~.agreement.DisagreementError`.
    """
    if torch.compiler.is_compiling() or not agreement.enabled():
        return check()
    try:
        result = check()
    except Exception as problem:  # whatever it is, the peers must not wait for this rank
        _tell_peers(op, process_group, problem)
        raise
    _tell_peers(op, process_group, None)
    return result


def _tell_peers(op: str, process_group: GroupLike, problem: Exception | None) -> None:
    agreement.agree(op, comm_by_name(group_name(process_group)), {}, problem)
