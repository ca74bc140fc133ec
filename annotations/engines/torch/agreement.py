"""What the ranks must have in common before they start, compared over a group."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from .capture import CaptureError


def same_examples(examples: Mapping[str, Any]) -> None:
    """Refuse example arguments of other shapes or dtypes than another rank's, on every rank.

    Raises:
        CaptureError: says who has what.
    """
    _compare("example arguments", _each(dict(examples), _kind), None)


def same_batch(args: Sequence[Any], kwargs: Mapping[str, Any], group: Any) -> None:
    """With ``SEQSHARD_CHECK=1``, refuse a batch of other values than another rank's of the copy.

    Copies the batch to the host, which makes it wait for the device.

    Raises:
        CaptureError: says which argument differs, on every rank of the group.
    """
    if os.environ.get("SEQSHARD_CHECK", "0") not in ("", "0"):
        given = {**{f"argument {n}": value for n, value in enumerate(args)}, **kwargs}
        _compare("batches of one copy", _each(given, _digest), group)


def same_graph(hashed: str, constants: Mapping[str, Tensor]) -> None:
    """Refuse a module that was captured as another graph than another rank's, or with other values
    of constants, on every rank.

    Raises:
        CaptureError: says who has which.
    """
    _compare("captured graphs", {"graph": hashed, **_each(dict(constants), _digest)}, None)


def _each(tree: Any, describe: Callable[[Any], str]) -> dict[str, str]:
    named, _ = pytree.tree_flatten_with_path(tree)
    return {
        ".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path): describe(value)
        for path, value in named
    }


def _kind(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else repr(value)


def _digest(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{_kind(value)} #{hashlib.sha256(data).hexdigest()[:8]}"


def _compare(what: str, mine: dict[str, str], group: Any) -> None:
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, mine, group=group)
    names = dict.fromkeys(name for each in every for name in each)
    differing = [n for n in names if len({each.get(n, "none") for each in every}) > 1]
    if differing:
        lines = [
            f"    {name}: "
            + ", ".join(f"rank {rank} {each.get(name, 'none')}" for rank, each in enumerate(every))
            for name in differing
        ]
        raise CaptureError("\n".join([f"the ranks' {what} must be the same, but differ", *lines]))
