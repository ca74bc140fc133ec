"""Helpers that look up what a graph's nodes are, and one that makes a node."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from annotations.registry import OpRecord

# These ops return the integers that they are given.
INTEGER_COPIES = (
    torch.ops.aten.clone.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.lift_fresh_copy.default,
)

# Types of open sizes, and of what is computed with them.
OPEN = (torch.SymInt, torch.SymBool, torch.SymFloat)


def is_getitem(node: Node) -> bool:
    """Whether ``node`` picks one of another node's results."""
    return node.target is operator.getitem


def resolve(node: Node) -> tuple[Node, int]:
    """The op that made a value and which of its results it is."""
    if is_getitem(node):
        source, index = node.args
        assert isinstance(source, Node) and isinstance(index, int)
        return source, index
    return node, 0


def origin(node: Node) -> Node:
    """The node that integers were copied from, whatever the dtype."""
    while node.target in INTEGER_COPIES:
        node = node.all_input_nodes[0]
    return node


def same_integers(a: Node | None, b: Node | None, constants: Mapping[str, Tensor]) -> bool:
    """Whether two origins have the same value: they are one node, or equal constants."""
    if a is None or b is None or a is b:
        return a is b
    known = a.name in constants and b.name in constants
    return known and torch.equal(constants[a.name], constants[b.name])


def module_of(node: Node) -> str:
    """Path of the module that called an op; empty for the outermost."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return stack[-1][0].removeprefix("L['self'].") if stack else ""


def values_of(node: Node) -> tuple[Any, ...]:
    """All results of a node, tensors without data."""
    value = node.meta.get("val")
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def shapes_in(node: Node) -> list[tuple[int, ...]]:
    """Shapes of an op's tensor inputs, with the example's sizes where sizes are open."""
    return [example_shape(x.meta["val"].shape) for x in tensor_inputs(node)]


def shapes_out(node: Node) -> list[tuple[int, ...]]:
    """Shapes of an op's results, with the example's sizes where sizes are open."""
    return [example_shape(x.shape) for x in values_of(node)]


def example_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """``shape`` with the example's sizes where sizes are open."""
    return tuple(map(example_size, shape))


def example_size(value: Any) -> Any:
    """The example's value of an open size; any other value as it is."""
    return value.node.hint if isinstance(value, OPEN) else value


def is_size(node: Node) -> bool:
    """Whether ``node`` computes an open size, or with one."""
    return isinstance(node.meta.get("val"), OPEN)


def is_whole_view(node: Node) -> bool:
    """Whether it is an alias, or a slice of all of a tensor."""
    aten = torch.ops.aten
    if node.target is aten.slice.Tensor and argument_of(node, "step") == 1:
        whole, view = (x.meta["val"].shape for x in (node.all_input_nodes[0], node))
        return list(map(str, whole)) == list(map(str, view))
    return node.target is aten.alias.default


def signature(node: Node, inputs: Sequence[Node]) -> Any:
    """A key that is equal only for calls that may run in the same ways."""
    shapes = tuple((tuple(x.meta["val"].shape), x.meta["val"].dtype) for x in inputs)
    if node.op == "placeholder":
        value = node.meta.get("val")
        return "placeholder", tuple(getattr(value, "shape", ())), getattr(value, "dtype", None)
    rest = with_inputs(node, lambda x, n: f"<{n}>")
    return node.target, shapes, repr(rest)


def arguments_of(node: Node, record: OpRecord) -> dict[str, Any]:
    """The op's arguments by name, tensors without data."""
    given = torch.fx.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
    return record.arguments(*given)


def argument_of(node: Node, name: str) -> Any:
    """An argument of a call by its name in the op's schema."""
    for n, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            if n < len(node.args):
                return node.args[n]
            return node.kwargs.get(name, argument.default_value)
    return None


def sizes_in(graph: Graph, given: Mapping[str, Any]) -> dict[Node, Any]:
    """What a graph computes from its inputs' open sizes, if placeholders stand for ``given``."""
    sizes: dict[Node, Any] = {}
    for node in filter(is_size, graph.nodes):
        source = node.args[0]
        if node.target is torch.ops.aten.sym_size.int and source.op == "placeholder":
            sizes[node] = given[source.name].shape[node.args[1]]
        elif all(x in sizes for x in node.all_input_nodes):
            sizes[node] = node.target(*torch.fx.map_arg(node.args, sizes.__getitem__))
        else:  # of a tensor that is made in the graph
            sizes[node] = node.meta["val"]
    return sizes


def tensor_inputs(node: Node) -> list[Node]:
    """The nodes whose tensors ``node`` reads, in argument order, each occurrence."""
    found: list[Node] = []

    def visit(arg: Node) -> Node:
        if isinstance(arg.meta.get("val"), Tensor):
            found.append(arg)
        return arg

    if node.target is not operator.getitem:
        torch.fx.map_arg((node.args, node.kwargs), visit)
    return found


def with_inputs(
    node: Node, replace: Callable[[Node, int], Any], sizes: Mapping[Node, Any] | None = None
) -> tuple[Any, Any]:
    """``node``'s args and kwargs with its n-th tensor input replaced by ``replace(input, n)``, and
    open sizes by what ``sizes`` has for them, if it is given."""
    count = itertools.count()

    def visit(arg: Node) -> Any:
        if isinstance(arg.meta.get("val"), Tensor):
            return replace(arg, next(count))
        return arg if sizes is None else sizes.get(arg, arg)

    return torch.fx.map_arg((node.args, node.kwargs), visit)


def call(graph: Graph, op: Any, *args: Any, **kwargs: Any) -> Node:
    """Insert a call of ``op`` at the graph's insertion point, and note what it returns."""
    node = graph.call_function(op, args, kwargs)
    values = torch.fx.map_arg(args, lambda arg: arg.meta["val"])
    node.meta["val"] = op(*values, **kwargs)
    return node
