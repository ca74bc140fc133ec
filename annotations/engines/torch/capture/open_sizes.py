"""Graphs whose sizes are left open: for which sizes such a graph is right.

torch.export can trace with symbols in place of sizes, and so can all that is done to a graph
afterwards. Wherever a size decides something (whether a dim is cut evenly, a branch of the model),
the trace goes on with the example's size, and notes what was decided. These conditions are exact:
any sizes that satisfy them give the same graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree
from torch.utils._sympy.numbers import int_oo

from .capture import Captured
from .nodes import example_size, is_size, is_whole_view


class NotOpen(ValueError):
    """A graph with open sizes cannot be made; says why."""


@dataclass(frozen=True)
class Conditions:
    """The sizes that a graph is for.

    Attributes:
        sizes: the number of a flat input, its dim, and its size: a symbol, or a multiple of one.
        hold: expressions that must be true.
    """

    sizes: Sequence[tuple[int, int, Any]]
    hold: Sequence[Any]

    def satisfied(self, flat: Sequence[Any]) -> bool:
        """Whether the graph is for flat inputs of these sizes."""
        values: dict[Any, Any] = {}
        for n, dim, size in self.sizes:
            multiple, symbol = size.as_coeff_Mul()
            value, rest = divmod(flat[n].shape[dim], int(multiple))
            if rest or values.setdefault(symbol, sympy.Integer(value)) != value:
                return False
        return all(bool(each.xreplace(values)) for each in self.hold)


def conditions_of(captured: Captured) -> Conditions:
    """What the open sizes of a graph have decided so far, as conditions. Raises NotOpen if one is
    fixed."""
    placeholders = {n.name: n for n in captured.graph.nodes if n.op == "placeholder"}
    sizes, hold = [], set[Any]()
    for n, dim in sorted(captured.inputs.open):
        size = placeholders[captured.user_inputs[n] or ""].meta["val"].shape[dim]
        symbol = size.node.expr.as_coeff_Mul()[1] if isinstance(size, torch.SymInt) else None
        if symbol is None or not symbol.is_Symbol:
            raise NotOpen(f"the model fixes dim {dim} of {captured.user_inputs[n]} to be {size}")
        sizes.append((n, dim, size.node.expr))
        environment = size.node.shape_env
        allowed = environment.var_to_range[symbol]
        hold.add(sympy.Ge(symbol, allowed.lower))
        if allowed.upper is not int_oo:
            hold.add(sympy.Le(symbol, allowed.upper))
        hold.update(environment.replace(guard.expr) for guard in environment.guards)
    known = {symbol for *_, size in sizes for symbol in size.free_symbols}
    if unknown := {symbol for each in hold for symbol in each.free_symbols} - known:
        raise NotOpen(f"the trace depends on {sorted(map(str, unknown))}, which no input tells")
    return Conditions(sizes, [each for each in hold if each is not sympy.true])


def named_as(captured: Captured, like: Captured) -> None:
    """Give the nodes of a graph with open sizes the names of those of ``like``, the same graph with
    sizes that are fixed. The two may take all of a tensor by other views, slices or aliases; those
    that ``like`` does not have are taken out.

    Raises:
        NotOpen: the graph does something else, or something with a size that shapes do not do.
    """
    here, there = (deque(_tensor_nodes(each.graph)) for each in (captured, like))
    place: dict[Node, int] = {}
    names: dict[Node, str] = {}
    while here or there:
        a, b = here[0] if here else None, there[0] if there else None
        if a and b and (a.op, _calling(a, place)) == (b.op, _calling(b, place)):
            place[a] = place[b] = len(names)
            names[a] = b.name
            here.popleft(), there.popleft()
        elif b and is_whole_view(b):
            place[there.popleft()] = place[b.all_input_nodes[0]]
        elif a and is_whole_view(a):
            a.replace_all_uses_with(a.all_input_nodes[0])
            captured.graph.erase_node(here.popleft())
        else:
            at = f" at {b.name}" if a and b else ""
            raise NotOpen(f"with its sizes open the model does something else{at}")
    for node, name in names.items():
        node.name = name


def _tensor_nodes(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if not is_size(node)]


def _calling(node: Node, place: Mapping[Node, int]) -> str:
    """What a node calls and on what, with the example's sizes."""

    def form(x: Node) -> Any:
        return example_size(x.meta["val"]) if is_size(x) else f"<{place[x]}>"

    arguments = torch.fx.map_arg((node.args, node.kwargs), form)
    return f"{node.target} {pytree.tree_map(example_size, arguments)}"
