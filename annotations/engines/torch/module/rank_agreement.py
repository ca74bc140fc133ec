"""What the ranks must have in common before they start, compared over a group."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from ...config import ComputeConfig
from ..capture.capture import CaptureError
from ..plan.saved_plan import is_path

PLANNED_WITH = ("rates", "memory_bytes")  # keys of pas_config


def same_request(
    config: ComputeConfig,
    policy: Any,
    module: Any,
    options: Mapping[str, Any],
    problem: Exception | None,
) -> None:
    """Refuse a call of ``parallelize`` that differs from another rank's, or that a rank refuses, on
    every rank.

    Functions and plans are not looked into, nor what only rank 0 plans with: speeds and memory.

    Args:
        module: what is to be parallelized, if it is a module.
        options: other keyword arguments. problem: why this rank cannot go on.
    Raises:
        CaptureError: says who has what, or what another rank refused. A rank with a problem raises
            that.
    """
    told: dict[str, Any] = {
        f"compute_config.{f.name}": getattr(config, f.name) for f in fields(config)
    }
    if isinstance(config.pas_config, Mapping):
        told["compute_config.pas_config"] = _sorted(config.pas_config, PLANNED_WITH)
    if isinstance(policy, Mapping):
        told["pas_policy"] = _sorted(policy)
    elif is_path(policy):
        told["pas_policy"] = "a file"
    else:
        told["pas_policy"] = policy if isinstance(policy, str) else type(policy).__name__
    facts = {name: repr(value) for name, value in {**told, **options}.items()}
    tensors: list[Tensor] = []
    if problem is None:
        try:
            tensors = [*module.parameters(), *module.buffers()]
            facts |= _held(module)
        except Exception as error:  # of parameters that have no shape yet, say
            problem = error
    with _on_device_of(tensors):
        _compare("calls of parallelize", facts, None, problem)
    if problem is not None:
        raise problem


def _held(module: torch.nn.Module) -> dict[str, str]:
    facts = {}
    for name, p in module.named_parameters():
        notes = [" frozen"] * (not p.requires_grad) + [" without data"] * p.is_meta
        facts[f"parameter {name}"] = _kind(p) + "".join(notes)
    return facts | {f"buffer {name}": _kind(b) for name, b in module.named_buffers()}


def _on_device_of(tensors: Sequence[Tensor]) -> contextlib.AbstractContextManager[object]:
    """In this context the GPU that a rank's model is on is the current one."""
    if tensors and tensors[0].is_cuda:
        return torch.cuda.device(tensors[0].device)
    return contextlib.nullcontext()


def _sorted(given: Mapping[Any, Any], without: Sequence[str] = ()) -> dict[Any, Any]:
    """By key, in whatever order it was written."""
    return {key: given[key] for key in sorted(given, key=repr) if key not in without}


def same_examples(examples: Mapping[str, Any]) -> None:
    """Refuse example arguments of other shapes or dtypes than another rank's, on every rank.

    Raises:
        CaptureError: says who has what.
    """
    _compare("example arguments", _each(dict(examples), _kind), None)


def same_batch(arguments: Callable[[], Mapping[str, Any]], group: Any, *, on_cpu: bool) -> None:
    """Refuse a batch whose tensors differ from another rank's of the copy: on CPUs unless
    ``SEQSHARD_CHECK=0``, on GPUs with ``SEQSHARD_CHECK=1``.

    Copies the batch to the host, which makes it wait for the device.

    Raises:
        CaptureError: says which argument differs, on every rank of the group.
    """
    if os.environ.get("SEQSHARD_CHECK", str(int(on_cpu))) not in ("", "0"):
        _compare("batches of one copy", _each(dict(arguments()), _digest), group)


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
        return type(value).__name__
    dense = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = dense.reshape(-1).view(torch.uint8).numpy()
    return f"{_kind(value)} #{hashlib.sha256(data).hexdigest()[:8]}"


def _compare(what: str, mine: dict[str, str], group: Any, problem: Exception | None = None) -> None:
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, (mine, None if problem is None else str(problem)), group=group)
    if problem is not None:
        return
    refused = [
        f"    rank {rank}: {text}" for rank, (_, text) in enumerate(told) if text is not None
    ]
    if refused:
        raise CaptureError("\n".join([f"{what}: refused on another rank", *refused]))
    every = [facts for facts, _ in told]
    names = dict.fromkeys(name for each in every for name in each)
    differing = [n for n in names if len({each.get(n, "none") for each in every}) > 1]
    if differing:
        lines = [
            f"    {name}: "
            + ", ".join(f"rank {rank} {each.get(name, 'none')}" for rank, each in enumerate(every))
            for name in differing
        ]
        raise CaptureError("\n".join([f"the ranks' {what} must be the same, but differ", *lines]))
