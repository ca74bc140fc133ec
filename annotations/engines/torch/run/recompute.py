"""Activation checkpointing: regions of a graph whose forward is run again in the backward.

A region is a run of nodes of one call of ``torch.utils.checkpoint`` in the user's model
(:mod:`.checkpointed`). Of its results only those are kept that are read outside of it.

Ops that communicate are not run again: what they returned is kept, as torch's selective
checkpointing does it. All else is dropped after the forward and computed again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Node
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from annotations.registry import record_of

from ..capture.checkpointed import region_of
from ..capture.nodes import is_getitem, resolve, tensor_inputs

# Functional collectives, and waiting for them.
COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor")


def parts(nodes: Sequence[Node]) -> list[Node | list[Node]]:
    """Ops in order, those of one checkpointed call together."""
    found: list[Node | list[Node]] = []
    for region, run in itertools.groupby(nodes, region_of):
        if region is None:
            found += run
        else:
            found.append(list(run))
    return found


def run_again(
    nodes: Sequence[Node], values: dict[tuple[Node, int], Any], execute: Callable[[Any], None]
) -> None:
    """Run a region, and once more in the backward; what lies between is not kept.

    Args:
        values: what ops have returned so far, by op and number of the result; results that are read
            outside of the region are added.
        execute: runs ``nodes`` on such values, adding all results.
    """
    reads, writes = _reads(nodes), _writes(nodes)

    def region(*inputs: Any) -> tuple[Any, ...]:
        inner = dict(zip(reads, inputs, strict=True))
        execute(inner)
        return tuple(inner[key] for key in writes)

    results = checkpoint(
        region,
        *[values[key] for key in reads],
        use_reentrant=False,
        preserve_rng_state=False,  # what draws, draws from a seed among the inputs
        context_fn=functools.partial(create_selective_checkpoint_contexts, _policy),
    )
    values.update(zip(writes, results, strict=True))


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    record = record_of(op)
    inside = record is not None and bool(record.rule.communicates)
    keeps = inside or getattr(op, "namespace", "") in COLLECTIVES
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def _reads(nodes: Sequence[Node]) -> list[tuple[Node, int]]:
    inside = set(nodes)
    read = dict.fromkeys(resolve(x) for node in nodes for x in tensor_inputs(node))
    return [key for key in read if key[0] not in inside]


def _writes(nodes: Sequence[Node]) -> list[tuple[Node, int]]:
    inside, found = set(nodes), dict[tuple[Node, int], None]()
    for node in nodes:
        for user in node.users:
            readers = user.users if is_getitem(user) else [user]
            if any(reader not in inside for reader in readers):
                found[resolve(user) if is_getitem(user) else (node, 0)] = None
    return list(found)
