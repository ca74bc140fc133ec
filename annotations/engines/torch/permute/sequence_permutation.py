"""Puts a sequence in another order once, rather than balancing it in every layer.

Causal attention has more work at the end of a sequence than at its start. If the sequence is cut
contiguously, ranks have uneven work, or exchange rows in every layer. Most other ops do not care
which token is where. So a sequence may be permuted at the graph's inputs, such that contiguous
parts are even work. Attention's arguments then name the order, and ops that do care (a convolution,
a roll) get natural order back.

    captured, cuts --choose_permutations--> SequencePermutation, notes  which ops run in which order
    captured, SequencePermutation --permuted--> captured                how ops go along a sequence
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from annotations.binding import BoundAnnotation
from annotations.registry import OpRecord, record_of
from annotations.rules import LateOrder, Order, SplitSite

from ..capture.capture import Captured
from ..capture.nodes import arguments_of, origin, same_integers
from ..rates import Rates
from ..strategies.op_seconds import cut_seconds, whole_seconds
from ..strategies.op_strategies import COST_ONLY
from .choice_notes import notes_of, sides_of
from .permutation_choice import PermutationChoice, follow, readers_of
from .permuted_graph import SequencePermutation, permuted
from .token_axes import Along, along_dim


@dataclass(frozen=True, eq=False)
class SequenceOp:
    """An annotated op whose arguments can name the order of its sequence.

    Attributes:
        cut: whether the policy cuts it on the sequence.
        given: its arguments by name; constants of the graph with their data.
    """

    node: Node
    record: OpRecord
    bound: BoundAnnotation
    identifier: str
    cut: bool
    given: Mapping[str, Any]

    @property
    def size(self) -> int:
        """The length of its sequence."""
        return self.bound.sizes[self.identifier]

    def wanted(self, parts: int) -> Order | LateOrder | None:
        """The order in which it wants its sequence, if it wants one."""
        orders = self.record.rule.orders[self.identifier]
        order = orders.wanted(self.bound, self.site(parts), self.given)
        if isinstance(order, LateOrder):
            return replace(order, by=self._origin(order.by).name)
        return order

    def arguments_for(
        self, order: Order | LateOrder, constants: Mapping[str, Tensor]
    ) -> Mapping[str, Any] | None:
        """The arguments that name an order; None if it cannot take it."""
        orders = self.record.rule.orders[self.identifier]
        if isinstance(order, Order):
            return orders.told(self.given, order)
        follow = orders.follow(order.name, self.given)
        if isinstance(follow, str) or self.size != order.length:
            return None
        by = next(node for node in self.node.graph.nodes if node.name == order.by)
        same = all(same_integers(self._origin(name), by, constants) for name in follow.by)
        return follow.arguments if same else None

    def _origin(self, name: str) -> Node:
        """The node that an argument was copied from."""
        return origin(self.record.arguments(self.node.args, self.node.kwargs)[name])

    def site(self, parts: int) -> SplitSite:
        """The site of its cut, for costs."""
        return SplitSite(self.identifier, self.size, parts, COST_ONLY)

    def way(self) -> Along:
        """How it goes along its sequence."""
        return along_dim(self.node, self.bound, self.identifier)

    def seconds(self, arguments: Mapping[str, Any], parts: int, rates: Rates) -> float:
        """Seconds of its forward and backward when it is cut, with these arguments."""
        given = {**self.given, **arguments}
        itemsize = next(v.dtype.itemsize for v in given.values() if isinstance(v, Tensor))
        rule = self.record.rule
        inner = rule.cost(self.bound, self.site(parts), given, itemsize)
        flops = 0.0 if rule.flops is None else rule.flops(self.bound, given)
        whole = whole_seconds(self.node, flops, rates)
        return cut_seconds(self.node, whole, [(inner, parts, rates.link(0))], backward=True)


def choose_permutations(
    captured: Captured,
    cuts: Mapping[str, str | None],
    parts: int,
    rates: Rates,
    settings: Mapping[str, Any],
    known: Mapping[str, Container[str]] | None = None,
) -> tuple[list[SequencePermutation], list[str]]:
    """What to permute, and what to say about it in the plan.

    Args:
        cuts: op name to the identifier that the policy cuts it on.
        parts: ranks that it cuts over. rates: those of these ranks; the first link is theirs.
        settings: the config's ``pas_config``. Its ``hoist`` is True for always and False for never;
            if it is not given, what is predicted to be faster is done.
        known: from an earlier plan, by the length of a sequence, the ops that run on it in another
            order.
    Returns:
        Rewrites to make one after the other, see :func:`.permuted`, at most one for each
        length of a sequence; and a line of text for each sequence that has uneven work.
    """
    found: list[SequencePermutation] = []
    notes: list[str] = []
    always = settings.get("hoist")
    if always is False:
        return found, notes
    # An op that is cut wants another order of these.
    for length in sorted({op.size for op in _ops(captured, cuts) if op.cut and op.wanted(parts)}):
        ops = [op for op in _ops(captured, cuts) if op.size == length]
        wanted = {op.node: o for op in ops if op.cut and (o := op.wanted(parts))}
        orders = {_key(order): order for order in wanted.values()}.values()
        tried = [_choice(captured, ops, order, parts, rates) for order in orders]
        forced = [replace(each, forced=sides_of(each, wanted)) for each in tried]
        if known is not None:
            names = known.get(str(length), ())
            forced = [
                replace(each, forced={n: n.name in names for n in each.ways}) for each in tried
            ]
        free = known is None and not always
        choice = min(tried if free else forced, key=lambda each: each.seconds)
        if not choice.gains.keys() & wanted.keys():
            continue
        notes += notes_of(choice, wanted)
        if choice.done:
            found.append(_permutation(captured, choice, ops))
            captured = permuted(captured, found[-1])
    return found, notes


def permutations_on_mesh(
    captured: Captured,
    splits: Mapping[str, Any],
    mesh_shape: Sequence[int],
    rates: Rates,
    settings: Mapping[str, Any],
    known: Mapping[str, Container[str]] | None = None,
) -> tuple[list[SequencePermutation], list[str]]:
    """:func:`choose_permutations` on a mesh: for sequences that are cut along one axis of it.

    Args:
        splits: op name to what it is split on, on a mesh of several axes a tuple of that.
    """
    if settings.get("hoist") is False:
        return [], []
    rules = {node.name: record_of(node.target) for node in captured.graph.nodes}
    cuts: dict[int, dict[str, str | None]] = {}
    for name, split in splits.items():
        record = rules.get(name)
        for axis, identifier in enumerate(split if isinstance(split, tuple) else (split,)):
            if record is not None and identifier in record.rule.orders:
                cuts.setdefault(axis, {})[name] = identifier
    if len(cuts) != 1:
        return [], ["sequences are cut along several axes; kept natural order"] if cuts else []
    ((axis, cut),) = cuts.items()
    along_axis = replace(rates, links=(rates.link(axis),))
    return choose_permutations(captured, cut, mesh_shape[axis], along_axis, settings, known)


def _choice(
    captured: Captured,
    ops: Sequence[SequenceOp],
    order: Order | LateOrder,
    parts: int,
    rates: Rates,
) -> PermutationChoice:
    gains, own = {}, {}
    for op in ops:
        arguments = op.arguments_for(order, captured.constants)
        if arguments is not None:
            own[op.node] = op.way()
            if op.cut:
                gains[op.node] = op.seconds({}, parts, rates) - op.seconds(arguments, parts, rates)
    readers = readers_of(captured.graph)
    ways = follow(readers, list(gains), own, order.length)
    return PermutationChoice(readers, ways, order, gains, parts, rates, {})


def _key(order: Order | LateOrder) -> Any:
    """What equal orders have in common."""
    return order.tokens.tobytes() if isinstance(order, Order) else order


def _permutation(
    captured: Captured,
    choice: PermutationChoice,
    ops: Sequence[SequenceOp],
) -> SequencePermutation:
    ways = {node.name: way for node, way in choice.ways.items() if choice.sides[node]}
    order = choice.order
    inside = [op for op in ops if op.node.name in ways]
    named = {op.node.name: op.arguments_for(order, captured.constants) or {} for op in inside}
    return SequencePermutation(order, ways, named)


def _ops(captured: Captured, cuts: Mapping[str, str | None]) -> list[SequenceOp]:
    """The calls of annotated ops that take an order, for each identifier."""
    found = []
    for node in captured.graph.nodes:
        record = record_of(node.target)
        if record is None or not record.rule.orders:
            continue
        bound = record.bind(arguments_of(node, record))
        given = record.arguments(*torch.fx.map_arg((node.args, node.kwargs), _reader(captured)))
        for split in bound.splits():
            if split.identifier in record.rule.orders:
                cut = cuts.get(node.name) == split.identifier
                found.append(SequenceOp(node, record, bound, split.identifier, cut, given))
    return found


def _reader(captured: Captured) -> Any:
    """A function from a node to its constant value or, if it has none, a tensor without data."""

    def read(node: Node) -> Any:
        if node.name in captured.constants:
            return captured.constants[node.name]
        if node.target is torch.ops.aten.clone.default:
            return read(node.args[0])  # type: ignore[arg-type]
        return node.meta["val"]

    return read
