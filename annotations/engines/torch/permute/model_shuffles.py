"""The order of tokens that a model's own shuffle puts them in, followed from op to op.

    tokens -- shuffle -- linear -- attention -- add -- unshuffle -- loss
              zigzag .............. (told) ............ natural

A shuffle (:class:`~annotations.rules.Reorders`) is the identity in a single-device program, and
permutes tokens where it is cut. If attention is cut along the same axis of the mesh, every shuffle
is cut with it, and attention is told the order. If not, the shuffles are taken out of the graph.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

from annotations.errors import PartitionError
from annotations.registry import OpRecord, record_of
from annotations.rules import Reorders

from ..capture.capture import Captured
from ..capture.nodes import (
    arguments_of,
    is_getitem,
    origin,
    resolve,
    same_integers,
    tensor_inputs,
)
from ..plan.policies import module_of
from .aten_axes import FAMILIES, filled, name_of
from .permuted_graph import tell
from .token_axes import Along, Place, along, along_split


@dataclass(frozen=True)
class _Held:
    """Attributes:
    place: where a tensor has the tokens. length: how many they are.
    order: its name. by: what it depends on, a node, or None.
    """

    place: Place
    length: int
    order: str
    by: Node | None

    def __str__(self) -> str:
        return self.order if self.by is None else f"{self.order} ({self.by.name})"


def shuffles(captured: Captured) -> list[Node]:
    """The ops of a graph that put tokens in another order, or back, or work in one."""
    return [node for node in captured.graph.nodes if _reorders(node) is not None]


def _reorders(node: Node) -> Reorders | None:
    """The rule of such an op."""
    record = record_of(node.target)
    rule = None if record is None else record.rule.reorders
    return rule if rule is not None and rule.moves(_given(node)) else None


def _given(node: Node) -> Mapping[str, Any]:
    record = record_of(node.target)
    assert record is not None
    return record.arguments(node.args, node.kwargs)


def without_shuffles(captured: Captured) -> Captured:
    """The same single-device program with no shuffle."""
    graph = copy.deepcopy(captured.graph)
    found = replace(captured, graph=graph)
    for node in shuffles(found):
        rule = _reorders(node)
        assert rule is not None
        before, after = rule.orders(_given(node))
        if before == after:  # it does something else, in that order
            tell(node, rule.natural)
        else:
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
    graph.lint()
    return found


def axis_of_shuffles(captured: Captured, splits: Mapping[str, Any]) -> int | None:
    """The axis of the mesh along which all ops that take an order are cut on it, or where there are
    none the shuffles themselves; else None.

    Args:
        splits: op name to what it is split on, on a mesh of several axes a tuple of that.
    """
    taking = {node.name for node in captured.graph.nodes if _takes_an_order(node)}
    taking = taking or {node.name for node in shuffles(captured)}
    axes = set()
    for name in taking:
        split = splits.get(name)
        each = split if isinstance(split, tuple) else (split,)
        cut = [axis for axis, identifier in enumerate(each) if identifier in ("l", "lq")]
        axes.add(cut[0] if len(cut) == 1 else None)
    return axes.pop() if len(axes) == 1 else None


def _takes_an_order(node: Node) -> bool:
    record = record_of(node.target)
    return record is not None and bool(record.rule.orders)


def ordered(captured: Captured) -> Captured:
    """``captured`` where the shuffles are cut: attention is told the order of its tokens.

    Raises:
        PartitionError: an op gets tokens in an order that it cannot take, or a result of the module
            has them in it; names the op, the order, and what would be accepted.
    """
    graph = copy.deepcopy(captured.graph)
    following = _Following(replace(captured, graph=graph))
    for node in list(graph.nodes):
        if not is_getitem(node):
            following.visit(node)
    graph.lint()
    return following.captured


class _Following:
    """Which results of a graph's ops have tokens in which order; those left out in natural."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self._held: dict[tuple[Node, int], _Held] = {}

    def visit(self, node: Node) -> None:
        inputs = tensor_inputs(node)
        held = [self._held.get(resolve(x)) for x in inputs]
        rule = _reorders(node)
        if rule is not None:
            self._shuffle(node, rule, held[0])
            return
        known = next(((slot, h) for slot, h in enumerate(held) if h is not None), None)
        if known is None:
            return
        slot, first = known
        if node.op == "output":
            raise _error(
                node, f"the module returns {inputs[slot].name} with its tokens {first}", _UNDO
            )
        takes = _takes_an_order(node)
        way = _way_of(node) if takes else along(node, first.place, first.length, slot=slot)
        if way is None or way.inputs[slot] != first.place:
            raise _error(
                node,
                f"it mixes tokens or depends on their places, and those of {inputs[slot].name} "
                f"are {first}",
                f"{_UNDO}, or an op that works token by token",
            )
        for source, place, has in zip(inputs, way.inputs, held, strict=True):
            if not self._agrees(has, first, place) and not _uniform(source):
                raise _error(
                    node,
                    f"its operands have tokens in different orders: {inputs[slot].name} {first}, "
                    f"{source.name} {has or 'natural'}",
                    "all operands that have the tokens in one order, through the same shuffle",
                )
        if takes:
            self._tell(node, first)
        for index, place in enumerate(way.outputs):
            if place is not None:
                self._held[node, index] = replace(first, place=place)

    def _shuffle(self, node: Node, rule: Reorders, held: _Held | None) -> None:
        record, given = record_of(node.target), _given(node)
        assert record is not None
        source = tensor_inputs(node)[0]
        splits = record.bind(arguments_of(node, record)).splits()
        if rule.identifier not in {split.identifier for split in splits}:
            what = "ranks would hold other numbers of tokens after it than before"
            raise _error(node, what, "a layout that leaves each rank as many, such as 'zigzag'")
        (place,) = (x for x in _way(node, record, rule.identifier).inputs if x is not None)
        by = None if rule.by is None else origin(given[rule.by])
        length, (before, after) = source.meta["val"].shape[place.dim], rule.orders(given)
        taken, made = (
            None if order is None else _Held(place, length, order, by) for order in (before, after)
        )
        if taken is None and held is not None:
            raise _error(node, f"the tokens of {source.name} are {held} already", _UNDO)
        if taken is not None and not self._agrees(held, taken, place):
            does = "works on" if made is not None else "restores natural order of"
            raise _error(
                node,
                f"it {does} tokens that are {taken}, but those of {source.name} are "
                f"{held or 'natural'}",
                "the tokens of the shuffle that it undoes, with the same arguments",
            )
        if made is not None:
            self._held[node, 0] = made

    def _tell(self, node: Node, held: _Held) -> None:
        record = record_of(node.target)
        assert record is not None
        given = record.arguments(node.args, node.kwargs)
        found = record.rule.orders[_tokens(node, record)].follow(held.order, given)
        if isinstance(found, str):
            raise _error(node, f"its tokens are {held}, and {found}", _UNDO)
        for name in found.by:
            by = origin(given[name])
            if held.by is None or not self._same(by, held.by):
                raise _error(
                    node,
                    f"its tokens are {held}, but {name} is another tensor, {by.name}",
                    f"the cu_seqlens that wrap_maybe_shuffle was given as {name}; or {_UNDO}",
                )
        tell(node, found.arguments)

    def _agrees(self, held: _Held | None, wanted: _Held, place: Place | None) -> bool:
        """Whether a tensor has the tokens in the order ``wanted`` at ``place``, or not at all."""
        if held is None or place is None:
            return held is None and place is None
        same = (held.place, held.length, held.order) == (place, wanted.length, wanted.order)
        return same and self._same(held.by, wanted.by)

    def _same(self, a: Node | None, b: Node | None) -> bool:
        return same_integers(a, b, self.captured.constants)


_UNDO = "natural order restored before it, as by wrap_maybe_unshuffle or wrap_unshuffle_func"


def _way_of(node: Node) -> Along | None:
    """How an op that takes an order goes along its tokens; None where it is not to be cut so."""
    record = record_of(node.target)
    assert record is not None
    identifier = _tokens(node, record)
    return _way(node, record, identifier) if identifier else None


def _tokens(node: Node, record: OpRecord) -> str:
    """What an op that takes an order calls its tokens; empty where it is not to be cut so."""
    splits = {split.identifier for split in record.bind(arguments_of(node, record)).splits()}
    return next((name for name in ("l", "lq") if name in splits & record.rule.orders.keys()), "")


def _way(node: Node, record: OpRecord, identifier: str) -> Along:
    return along_split(node, record.bind(arguments_of(node, record)).split(identifier))


def _uniform(node: Node) -> bool:
    """Whether a tensor is the same at every token: made of one number."""
    return FAMILIES.get(name_of(node)) is filled


def _error(node: Node, what: str, expected: str) -> PartitionError:
    record = record_of(node.target)
    where = module_of(node) or "the module"
    title = str(node.target) if record is None else record.title
    name = "the module's results" if node.op == "output" else f"{node.name} ({title} in {where})"
    details: Sequence[str] = [f"expected: {expected}"]
    return PartitionError(what, details=details, op=name)
