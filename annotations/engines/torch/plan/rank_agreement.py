"""What the ranks of a module compare: calls of ``parallelize``, examples, batches, graphs."""

from __future__ import annotations

import functools
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist

from annotations.consistency import Statements, described
from annotations.waiting import patience, tell

from ...config import ComputeConfig
from ..capture.call_inputs import named_leaves
from ..capture.capture import CaptureError
from .policies import is_path

LATE = "another rank has not come, or is at something else"
PLANNED_WITH = ("rates", "memory_bytes")  # keys of pas_config


def facts_of(tree: Any, describe: Callable[[Any], str]) -> dict[str, str]:
    """Each leaf of nested arguments, by its path."""
    return {name: describe(value) for name, value in named_leaves(tree)}


def compare(
    what: str, facts: Mapping[str, str], group: Any = None, problem: Exception | None = None
) -> None:
    """Raise on every rank if facts differ between ranks of ``group`` (None: all ranks).

    Args:
        problem: why this rank cannot go on; the other ranks then raise.
    Raises:
        CaptureError: says who has what, or what another rank refused; not on a rank with a problem.
    """

    gather = functools.partial(gathered, group=group, what=what)
    said = Statements.gather(gather, facts, problem)
    lines: list[str] = []
    if said.problems:
        lines = [f"{what}: refused on another rank", *said.refusals()]
    elif differing := said.differing():
        lines = [f"the ranks' {what} must be the same, but differ"]
        for name in differing:
            each = (f"rank {r} {facts.get(name, 'none')}" for r, facts in enumerate(said.facts))
            lines.append(f"{name}: {', '.join(each)}")
    if lines and problem is None:
        raise CaptureError("\n    ".join(lines))


def gathered(mine: Any, group: Any = None, what: str = "facts") -> list[Any]:
    """What all ranks of ``group`` say, in order. A rank that waits long warns once."""
    said: list[Any] = [None] * dist.get_world_size(group)
    seconds = patience()
    text = f"rank {dist.get_rank()} has waited {seconds:g} s where ranks compare {what}: {LATE}"
    timer = threading.Timer(seconds, tell, (text,))
    timer.daemon = True
    timer.start()
    try:
        dist.all_gather_object(said, mine, group=group)
    finally:
        timer.cancel()
    return said


def from_rank_0(make: Callable[[], Any], group: Any = None) -> Any:
    """What the first rank makes, or the error that it raises, on every rank."""
    made: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            made = [make()]
        except Exception as error:  # the other ranks would wait forever
            made = [error]
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:  # a user's error, of which only the text can be sent
                made = [RuntimeError(f"{type(error).__name__}: {error}")]
    dist.broadcast_object_list(made, group=group, group_src=0)
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]


def same_request(
    config: ComputeConfig,
    policy: Any,
    module: Any,
    options: Mapping[str, Any],
    problem: Exception | None,
) -> None:
    """Raise on every rank, as :func:`compare` does, if calls of ``parallelize`` differ between
    ranks, or if a rank refuses its call; a rank with a problem raises that problem. The contents of
    functions and plans are not compared, nor what only rank 0 plans with: speeds and memory."""
    said = {f"compute_config.{f.name}": getattr(config, f.name) for f in fields(config)}
    if isinstance(config.pas_config, Mapping):
        said["compute_config.pas_config"] = _sorted(config.pas_config, PLANNED_WITH)
    named: Any = policy if isinstance(policy, str) else type(policy).__name__
    if isinstance(policy, Mapping):
        named = _sorted(policy)
    elif is_path(policy):
        named = "a file"
    facts = {n: repr(x) for n, x in {**said, "pas_policy": named, **options}.items()}
    first = torch.empty(0)
    if problem is None:
        try:
            first = next((t for t in (*module.parameters(), *module.buffers())), first)
            for name, p in module.named_parameters():
                notes = " frozen" * (not p.requires_grad) + " without data" * p.is_meta
                facts[f"parameter {name}"] = described(p) + notes
            facts |= {f"buffer {name}": described(b) for name, b in module.named_buffers()}
        except Exception as error:  # of parameters that have no shape yet, say
            problem = error
    with torch.cuda.device_of(first):  # NCCL sends what is on the current device
        compare("calls of parallelize", facts, problem=problem)
    if problem is not None:
        raise problem


def _sorted(given: Mapping[Any, Any], without: Sequence[str] = ()) -> dict[Any, Any]:
    """The entries in the order of their keys."""
    return {key: given[key] for key in sorted(given, key=repr) if key not in without}
