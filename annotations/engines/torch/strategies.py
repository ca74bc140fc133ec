"""How each op of a captured graph may run on a one-axis mesh.

A strategy says how an op's tensor inputs must lie and how its results then lie. For annotated ops
they follow from the annotation. For every other op DTensor itself is asked: the op is run on meta
tensors that lie in each possible way, and what ran without communication is a strategy. That keeps
one source of truth for what DTensor can do, whatever its version.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx import Node
from torch.utils import _pytree as pytree

from annotations.binding import BoundAnnotation, Split, bind
from annotations.dtensor import placement
from annotations.errors import PartitionError
from annotations.registry import OpRecord, record_of
from annotations.rules import InnerCost, SplitSite, check_parts

from .capture import tensor_inputs, with_inputs

# Beyond this many tensor inputs only uniform placements are tried.
ALL_COMBINATIONS_INPUTS = 3

# Aten ops that may run on local tensors, by their number of tensor inputs. DTensor's own rule of
# linear flattens the leading dims, which it refuses for uneven shards.
ATEN: dict[Any, dict[int, str]] = {
    torch.ops.aten.linear.default: {2: "* k^, n k^ -> * n", 3: "* k^, n k^, n -> * n"}
}

# Group name under which costs are asked for; no group is used.
COST_ONLY = "cost only"

NOTHING = InnerCost()


@dataclass(frozen=True)
class Strategy:
    """One way to run an op.

    Attributes:
        inputs: placement of each tensor input, in argument order.
        outputs: placement of each result.
        identifier: what an annotated op is split on, None if it is not split.
        inner: what an annotated op moves inside, and how uneven the parts of its work are.
        local: run the op on the local tensors themselves, not through DTensor.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    identifier: str | None = None
    inner: InnerCost = NOTHING
    local: bool = False

    @property
    def divides(self) -> bool:
        """Whether each rank does only its part of the work."""
        return any(p.is_shard() for p in (*self.inputs, *self.outputs))


def strategies_of(node: Node, mesh: DeviceMesh, known: dict[Any, Any]) -> list[Strategy]:
    """Every way to run ``node``; the first is always to run it whole on each rank.

    Args:
        known: a cache to pass to every call; equal ops are asked once.
    """
    record = record_of(node.target)
    if record is not None:
        return annotated_strategies(node, record, mesh.size())
    inputs = tensor_inputs(node)
    if node.target in ATEN:
        return local_strategies(node, inputs, mesh.size())
    if node.op in ("placeholder", "output") or not inputs:
        return [Strategy((Replicate(),) * len(inputs), (Replicate(),) * _n_outputs(node))]
    key = _signature(node, inputs)
    if key not in known:
        known[key] = _ask_dtensor(node, inputs, mesh)
    return known[key]


def annotated_strategies(node: Node, record: OpRecord, parts: int) -> list[Strategy]:
    """The splits that the annotation allows over ``parts`` ranks.

    Those of an alternative that cut inputs and results as one found before does are left out.
    """
    arguments = arguments_of(node, record)
    names = list(record.signature.parameters)
    tensors = [n for n, name in enumerate(names) if isinstance(arguments[name], Tensor)]
    found = [Strategy((Replicate(),) * len(tensors), (Replicate(),) * record.n_outputs)]
    for bound in record.bindings(arguments):
        known = {(strategy.inputs, strategy.outputs) for strategy in found[1:]}
        for split in bound.splits():
            cuts = [split.inputs[n] if n < len(split.inputs) else None for n in tensors]
            inputs = tuple(Replicate() if cut is None else placement(cut) for cut in cuts)
            outputs = tuple(placement(cut) for cut in split.outputs)
            if (inputs, outputs) in known or not _can_be_cut(bound, split, parts):
                continue
            inner = _inner_cost(record, bound, split, parts, arguments)
            found.append(Strategy(inputs, outputs, split.identifier, inner))
    return found


def arguments_of(node: Node, record: OpRecord) -> dict[str, Any]:
    """The op's arguments by name, tensors without data."""
    return record.arguments(
        *pytree.tree_map(_value_of, (node.args, node.kwargs), is_leaf=lambda x: isinstance(x, Node))
    )


def _can_be_cut(bound: BoundAnnotation, split: Split, parts: int) -> bool:
    """Whether every rank gets some of it, and no inner dim is torn."""
    try:
        check_parts(bound, split, parts)
    except PartitionError:
        return False
    return bound.sizes[split.identifier] >= parts


def _inner_cost(
    record: OpRecord, bound: BoundAnnotation, split: Split, parts: int, arguments: dict[str, Any]
) -> InnerCost:
    site = SplitSite(split.identifier, bound.sizes[split.identifier], parts, COST_ONLY)
    itemsize = next(v.dtype.itemsize for v in arguments.values() if isinstance(v, Tensor))
    return record.rule.cost(bound, site, arguments, itemsize)


def local_strategies(node: Node, inputs: Sequence[Node], parts: int) -> list[Strategy]:
    """The splits of an aten op that this engine has an annotation for."""
    shapes = [tuple(x.meta["val"].shape) for x in inputs]
    names = [f"input {n}" for n in range(len(inputs))]
    bound = bind(ATEN[node.target][len(inputs)], str(node.target), names, shapes)
    whole = Strategy((Replicate(),) * len(inputs), (Replicate(),))
    return [whole] + [
        Strategy(
            tuple(placement(cut) for cut in split.inputs),
            tuple(placement(cut) for cut in split.outputs),
            local=True,
        )
        for split in bound.splits()
        if bound.sizes[split.identifier] >= parts
    ]


def _value_of(x: Any) -> Any:
    return x.meta["val"] if isinstance(x, Node) else x


def _n_outputs(node: Node) -> int:
    value = node.meta.get("val")
    return len(value) if isinstance(value, tuple | list) else 1


def _signature(node: Node, inputs: Sequence[Node]) -> Any:
    shapes = tuple((tuple(x.meta["val"].shape), x.meta["val"].dtype) for x in inputs)
    rest = with_inputs(node, lambda x, n: f"<{n}>")
    return node.target, shapes, repr(rest)


def _ask_dtensor(node: Node, inputs: Sequence[Node], mesh: DeviceMesh) -> list[Strategy]:
    whole = Strategy((Replicate(),) * len(inputs), (Replicate(),) * _n_outputs(node))
    choices = [_placements(x.meta["val"], mesh.size()) for x in inputs]
    if len(inputs) <= ALL_COMBINATIONS_INPUTS:
        combinations = list(itertools.product(*choices))
    else:
        combinations = [(p,) * len(inputs) for p in choices[0] if all(p in c for c in choices)]
    found = [whole]
    for places in combinations:
        if all(p.is_replicate() for p in places):
            continue
        outputs = _run_on_meta(node, inputs, places, mesh)
        if outputs is not None:
            found.append(Strategy(places, outputs))
    return found


def _placements(value: Tensor, parts: int) -> list[Placement]:
    cuts = [Shard(dim) for dim in range(value.ndim) if value.shape[dim] >= parts]
    return [Replicate(), *cuts]


def _run_on_meta(
    node: Node, inputs: Sequence[Node], places: Sequence[Placement], mesh: DeviceMesh
) -> tuple[Placement, ...] | None:
    """Placements of the results, or None where the op communicates or cannot run."""

    def meta(x: Node, n: int) -> Tensor:
        value = x.meta["val"]
        shape = list(value.shape)
        if isinstance(cut := places[n], Shard):
            shape[cut.dim] = -(-shape[cut.dim] // mesh.size())  # rank 0's part
        local = torch.empty(shape, dtype=value.dtype, device="meta")
        stride = torch.empty(value.shape, device="meta").stride()
        like = DTensor.from_local(
            local, mesh, [places[n]], run_check=False, shape=value.shape, stride=stride
        )
        return like.requires_grad_(value.is_floating_point())

    args, kwargs = with_inputs(node, meta)
    # DTensor logs how it would communicate; it is only being asked.
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with torch.enable_grad(), CommDebugMode() as counted:
            results = node.target(*args, **_on_meta(kwargs))  # type: ignore[operator]
            flat = [results] if isinstance(results, Tensor) else list(results)
            _differentiate(flat)
    except Exception:
        # DTensor refuses in many ways (NotImplementedError, RuntimeError, AssertionError, ...), and
        # each of them means the same: not like this. The op still runs whole.
        return None
    finally:
        logging.disable(before)
    if counted.get_total_counts():
        return None
    outputs = tuple(r.placements[0] if isinstance(r, DTensor) else None for r in flat)
    plain = all(type(p) in (Replicate, Shard) or p == Partial("sum") for p in outputs)
    return outputs if plain else None  # type: ignore[return-value]


def _differentiate(results: Sequence[Any]) -> None:
    """Run the backward too: some ops run on a cut tensor but their backward does not."""
    made = [r for r in results if isinstance(r, DTensor) and r.requires_grad]
    # The gradient of a partial sum is the same on every rank; others lie as the result does.
    grads = [
        r.redistribute(placements=[Replicate()]) if r.placements[0].is_partial() else r
        for r in made
    ]
    torch.autograd.backward(made, [grad.detach() for grad in grads])


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: torch.device("meta") if k == "device" and v else v for k, v in kwargs.items()}


def is_getitem(node: Node) -> bool:
    """Whether ``node`` picks one of another node's results."""
    return node.target is operator.getitem
