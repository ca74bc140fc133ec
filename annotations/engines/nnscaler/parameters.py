"""Checks the parameters of an nnscaler graph that is cut.

Takes nnscaler's nodes, but imports none of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from annotations.errors import PartitionError

# By the part of a parameter that is read, the parts of the op that read it: each by where the parts
# of its other inputs begin and end.
Readers = Mapping[Any, set[Any]]


def check_parameters(nodes: Iterable[Any]) -> None:
    """Refuse cuts by which a parameter (a weight, a sink) is both cut and copied.

    nnscaler adds up the gradients of whole copies. Its code generator cannot do so for copied
    parts, and stops with an assertion that names neither op nor parameter.

    Args:
        nodes: the ops of a graph that is cut.
    Raises:
        PartitionError: names the op, the parameter, and what would fit.
    """
    readers: dict[Any, dict[Any, dict[Any, set[Any]]]] = {}  # by parameter and op
    ranks: dict[Any, dict[Any, set[int]]] = {}
    ops: dict[Any, Any] = {}
    for node in nodes:
        tensors = [tensor for tensor in node.inputs() if hasattr(tensor, "indmap")]
        made = [tensor.parent for tensor in node.outputs() if hasattr(tensor, "parent")]
        where = tuple(tensor.indmap for tensor in tensors)
        for index, tensor in enumerate(node.inputs()):
            if not made or not hasattr(tensor, "indmap") or not tensor.is_param():
                continue
            ignored = getattr(node, "ignore_grad_reduce", None)
            if not tensor.requires_grad or (ignored is not None and ignored(input_idx=index)):
                continue
            whole, op = tensor.parent, made[0]
            ops[op] = node
            readers.setdefault(whole, {}).setdefault(op, {}).setdefault(tensor.indmap, set()).add(
                where
            )
            ranks.setdefault(whole, {}).setdefault(op, set()).update(node.device)
    for parameter, by_op in readers.items():
        on = list(ranks[parameter].values())
        if any(each != on[0] for each in on):
            continue  # stages that share it: nnscaler adds up the gradients of each part over them
        for op, parts in by_op.items():
            if len(parts) > 1 and any(len(each) > 1 for each in parts.values()):
                raise _error(ops[op], parameter, parts)


def _error(node: Any, parameter: Any, parts: Readers) -> PartitionError:
    copies = max(map(len, parts.values()))
    return PartitionError(
        f"a call in {node.fqn or 'the module'} is cut so that the parameter {parameter.name} "
        f"{tuple(parameter.shape)} is in {len(parts)} parts, each read by {copies} parts of the "
        "call, and nnscaler does not add up their gradients",
        details=["expected: cuts of the call which all cut the parameter, or none of which does"],
        op=node.name,
    )
