"""What the functions of ring_flash_attn share: their group, tensors with k and v in one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...core.comm import Comm
from ...core.comm.comm_groups import GroupLike, group_comm
from ...op.arguments import ArgumentError, checked
from ..peer_calls import renamed

Result = Tensor | tuple[Tensor, Tensor, None]


def comm_of(title: str, group: GroupLike) -> Comm:
    """The ranks of ``group``, or of the world; ArgumentError where there is none."""
    if group is None:
        if not dist.is_initialized():
            raise ArgumentError(
                f"{title}: group=None is the world, but torch.distributed is not initialised; "
                "initialise it or pass a group"
            )
        group = dist.group.WORLD
    return group_comm(group)


def _parts(name: str, packed: str, stacked: Tensor) -> tuple[Tensor, ...]:
    if stacked.ndim < 4 or stacked.shape[-3] != len(packed):
        raise ArgumentError(
            f"{name}: dim -3 of {packed} must hold {', '.join(packed)}, got {packed} of shape "
            f"{tuple(stacked.shape)}"
        )
    return stacked.unbind(-3)


def of_packed(function: Callable[..., Result], packed: str) -> Callable[..., Result]:
    """``function`` for a tensor that holds the inputs named by ``packed``, stacked on dim -3."""
    name = function.__name__.replace("_func", f"_{packed}packed_func")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Result:
        given = signature.bind(*args, **kwargs).arguments
        stacked, comm = given.pop(packed), comm_of(name, given.get("group"))
        parts = checked(name, comm, lambda: _parts(name, packed, stacked))
        return function(**{**given, "group": comm}, **dict(zip(packed, parts, strict=True)))

    plain = inspect.signature(function)
    others = [each for each in plain.parameters.values() if each.name not in packed]
    stack = inspect.Parameter(packed, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="Tensor")
    others.insert(int(packed == "kv"), stack)
    signature = plain.replace(parameters=others)
    return renamed(call, name, signature, function.__doc__)
