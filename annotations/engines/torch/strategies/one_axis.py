"""How an op may run along one axis of the mesh, as annotations say: annotated ops, and a few of
torch's that may run on local tensors. A parameter may be kept in parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.fx import Node

from annotations.binding import BoundAnnotation, Split, Spread, check_parts
from annotations.errors import PartitionError
from annotations.library.dtensor import gradient_placement, placement
from annotations.registry import OpRecord

from ..capture.nodes import arguments_of, tensor_inputs
from .aten import bound_of


@dataclass(frozen=True)
class AxisStrategy:
    """One way to run an op along one mesh axis.

    Attributes:
        inputs: placement of each tensor input, in argument order.
        outputs: placement of each result.
        grads: placement of each input's gradient.
        identifier: what an annotated op is split on, None if it is not split.
        local: the op may run on the local tensors themselves, not through DTensor.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    grads: tuple[Placement, ...]
    identifier: str | None = None
    local: bool = False

    @property
    def divides(self) -> bool:
        """Whether each rank does only its part of the work."""
        return any(p.is_shard() for p in (*self.inputs, *self.outputs))


def whole(n_inputs: int, n_outputs: int) -> AxisStrategy:
    """To run an op whole on every rank."""
    kept = (Replicate(),) * n_inputs
    return AxisStrategy(kept, (Replicate(),) * n_outputs, kept)


def stored_strategies(node: Node, parts: int) -> list[AxisStrategy]:
    """Ways to keep a parameter: whole or, for a matrix, cut on one of its dims."""
    value = node.meta["val"]
    dims = range(value.ndim if value.ndim > 1 else 0)
    cut = [Shard(dim) for dim in dims if value.shape[dim] >= parts]
    return [whole(0, 1), *(AxisStrategy((), (shard,), ()) for shard in cut)]


def annotated_strategies(node: Node, record: OpRecord, parts: int) -> list[AxisStrategy]:
    """The splits that the annotation allows over ``parts`` ranks.

    A split is left out if one of an earlier alternative cuts inputs and results in the same way.
    """
    arguments = arguments_of(node, record)
    names = list(record.signature.parameters)
    tensors = [n for n, name in enumerate(names) if isinstance(arguments[name], Tensor)]
    found = [whole(len(tensors), record.n_outputs)]
    for bound in record.bindings(arguments):
        known = {(strategy.inputs, strategy.outputs) for strategy in found[1:]}
        for split in _splits(bound, parts):
            made = _of_split(split, tensors, _may_run_locally(record, split))
            if (made.inputs, made.outputs) not in known:
                found.append(made)
    return found


def local_strategies(node: Node, parts: int) -> list[AxisStrategy]:
    """The splits of an op of :data:`.aten.LOCAL` over ``parts`` ranks."""
    bound = bound_of(node)
    assert bound is not None
    tensors = range(len(tensor_inputs(node)))
    splits = _splits(bound, parts)
    return [whole(len(tensors), 1), *(_of_split(split, tensors, True) for split in splits)]


def _splits(bound: BoundAnnotation, parts: int) -> Iterator[Split]:
    """The splits that give every rank something, and do not cut through an inner dim."""
    for split in bound.splits():
        with contextlib.suppress(PartitionError):
            check_parts(bound, split, parts)
            if bound.sizes[split.identifier] >= parts:
                yield split


def _of_split(split: Split, tensors: Sequence[int], local: bool) -> AxisStrategy:
    n_annotated = len(split.inputs)
    cuts = [split.inputs[n] if n < n_annotated else Spread.REPLICATE for n in tensors]
    reduces = [split.grad_reduce[n] if n < n_annotated else True for n in tensors]
    return AxisStrategy(
        tuple(placement(cut) for cut in cuts),
        tuple(placement(cut) for cut in split.outputs),
        tuple(gradient_placement(cut, reduce) for cut, reduce in zip(cuts, reduces, strict=True)),
        split.identifier,
        local,
    )


def _may_run_locally(record: OpRecord, split: Split) -> bool:
    """Whether the unchanged op on each rank's part gives that part of results and gradients."""
    aware = record.rule.shard_aware
    return split.identifier not in aware and Spread.REPLICATE not in split.outputs
