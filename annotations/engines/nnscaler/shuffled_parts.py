"""Which parts have their tokens in the order of a shuffle that the model calls itself."""

from __future__ import annotations

from typing import Any

import nnscaler.policies
from nnscaler.ir.cten import IRTensor

from annotations.rules import PartitionRule

from . import placement
from .following_order import TokenOrders
from .graph_values import on_meta, restored, traced
from .op_node import OpNode


def token_orders(graph: Any) -> TokenOrders:
    """The orders of tokens in a graph of whole ops."""

    def rule_of(node: Any) -> PartitionRule | None:
        return node.rule if isinstance(node, OpNode) else None

    def original(node: OpNode, name: str) -> Any:
        call, given = node.call, node.arguments()
        own = [n for n in given if call.names.get(n, n) == name]
        if not own and name == "cu_seqlens_k":  # one argument for q and k
            own = [n for n in given if n == "cu_seqlens"]
        value = given[own[-1]] if own else None
        if isinstance(value, IRTensor):
            return value.parent
        if own and value is not None:
            return restored(traced(value))
        return call.op(on_meta({n: restored(v) for n, v in given.items()}))[1].get(name)

    return TokenOrders(nnscaler.policies.get_pas_ops(graph), graph.outputs(), rule_of, original)


def mark_shuffled(orders: TokenOrders, graph: Any) -> None:
    """Mark the parts whose calls must name the order of their tokens.

    Raises:
        PartitionError: see :meth:`TokenOrders.check`.
    """
    if not orders.shuffles:
        return
    groups: dict[Any, frozenset[tuple[int, ...]]] = {}
    parts = graph.select(ntype=OpNode)
    for part in parts:
        cut = [site for site in part.sites() if site.group or site.identifier in part.rule.orders]
        ranks = {placement.devices(part, site, part.placed) for site in cut}
        whole = part.outputs()[0].parent
        groups[whole] = groups.get(whole, frozenset()) | ranks
    if orders.check(groups):
        for part in parts:
            part.order = orders.orders.get(part.outputs()[0].parent)
