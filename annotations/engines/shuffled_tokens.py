"""Follows, from op to op, the order that a model's own shuffle puts tokens in.

    tokens -- shuffle -- linear -- attention -- add -- unshuffle -- loss
              zigzag ............. (named) ............ natural

A shuffle (:class:`~annotations.rules.Reorders`) is the identity in a single-device program, and
permutes tokens where it is cut. From there to the op that restores natural order, attention gets
the order as arguments. Each engine shows the ops of its graphs as a :class:`Call`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from annotations.errors import PartitionError
from annotations.rules import PartitionRule, Reorders

MIXES = "it mixes tokens or depends on their places"
UNKNOWN = "nothing is known of how it goes along tokens"
_DIFFER = "its operands have tokens in different orders"
_SAME = "all operands that have the tokens in one order, through the same shuffle"
_UNDO = "natural order restored before it, as by wrap_maybe_unshuffle or wrap_unshuffle_func"


@dataclass(frozen=True)
class TokenOrder:
    """The order of a tensor's tokens.

    Attributes:
        dim: where the tensor has its tokens, in the engine's own terms.
        order: its name. by: what it depends on, such as lengths of documents; None if on nothing.
    """

    dim: Any
    order: str
    by: Any

    def __str__(self) -> str:
        return self.order if self.by is None else f"{self.order} ({_name(self.by)})"


@dataclass(frozen=True)
class TokenDims:
    """How an op goes along its tokens.

    Attributes:
        inputs, outputs: where each tensor has them, as :attr:`TokenOrder.dim`; None where it has
            none, or is the same at every token.
        identifier: the name of the tokens in an op that takes an order; empty if it works in any.
    """

    inputs: Sequence[Any]
    outputs: Sequence[Any]
    identifier: str = ""


class Call(ABC):
    """An op of a graph.

    Attributes:
        title: for errors. rule: of an annotated op.
        arguments: of an annotated op, by name.
        inputs, outputs: its tensors, each by something that has a hash and a name.
    """

    title: str
    rule: PartitionRule | None
    arguments: Mapping[str, Any]
    inputs: Sequence[Any]
    outputs: Sequence[Any]

    @property
    def shuffle(self) -> Reorders | None:
        """The rule of an op that puts tokens in another order, or back, or works in one."""
        found = None if self.rule is None else self.rule.reorders
        return found if found is not None and found.moves(self.arguments) else None

    @abstractmethod
    def dim_of(self, identifier: str) -> Any:
        """Where the first input has this identifier; None where it is not to be cut."""

    @abstractmethod
    def along(self, slot: int, dim: Any) -> TokenDims | str:
        """How it goes along the tokens that input ``slot`` has in ``dim``, or why it cannot, such
        as :data:`MIXES`."""

    @abstractmethod
    def origin(self, name: str) -> Any:
        """An argument; if it is a copy, what it was copied from."""

    @abstractmethod
    def take(self, order: TokenOrder, arguments: Mapping[str, Any]) -> None:
        """Note the arguments that name the order of its tokens."""


class TokenOrders:
    """Which tensors of a graph have their tokens in which order; others have natural order."""

    def __init__(self, same: Callable[[Any, Any], bool]) -> None:
        """
        Args:
            same: tells, given what two orders depend on, whether these are the same.
        """
        self._known: dict[Any, TokenOrder] = {}
        self._same = same

    def visit(self, call: Call) -> None:
        """Follow the order through an op; the ops before it have been visited.

        Raises:
            PartitionError: it gets tokens in an order that it cannot take; names the op, the order,
                and what would be accepted.
        """
        orders = [self._known.get(tensor) for tensor in call.inputs]
        if call.shuffle is not None:
            self._shuffle(call, call.shuffle, orders[0])
            return
        known = next(((slot, order) for slot, order in enumerate(orders) if order), None)
        if known is None:
            return
        slot, first = known
        along = call.along(slot, first.dim)
        if isinstance(along, str):
            raise order_error(
                call.title,
                f"{along}, and those of {_name(call.inputs[slot])} are {first}",
                f"{_UNDO}, or an op that works token by token",
            )
        for n, (order, dim) in enumerate(zip(orders, along.inputs, strict=True)):
            if not self._agrees(order, first, dim):
                alike = order is not None and self._agrees(order, first, order.dim)
                what, expected = (MIXES, _UNDO) if alike else (_DIFFER, _SAME)
                raise order_error(
                    call.title,
                    f"{what}: {_name(call.inputs[slot])} {first}, "
                    f"{_name(call.inputs[n])} {order or 'natural'}",
                    expected,
                )
        if along.identifier:
            self._take(call, along.identifier, first)
        for tensor, dim in zip(call.outputs, along.outputs, strict=True):
            if dim is not None:
                self._known[tensor] = replace(first, dim=dim)

    def returned(self, tensors: Iterable[Any]) -> None:
        """Check a module's results.

        Raises:
            PartitionError: one has its tokens in another order than natural.
        """
        for tensor in tensors:
            if tensor in self._known:
                what = f"the module returns tokens that are {self._known[tensor]}: {_name(tensor)}"
                raise order_error("the module's results", what, _UNDO)

    def _shuffle(self, call: Call, rule: Reorders, order: TokenOrder | None) -> None:
        dim, name = call.dim_of(rule.identifier), _name(call.inputs[0])
        if dim is None:
            raise order_error(
                call.title,
                "ranks would hold other numbers of tokens after it than before",
                "a layout that leaves each rank as many, such as 'zigzag'",
            )
        by = None if rule.by is None else call.origin(rule.by)
        taken, made = (
            None if each is None else TokenOrder(dim, each, by)
            for each in rule.orders(call.arguments)
        )
        if taken is None and order is not None:
            raise order_error(call.title, f"the tokens of {name} are {order} already", _UNDO)
        if taken is not None and not self._agrees(order, taken, dim):
            does = "works on" if made is not None else "restores natural order of"
            raise order_error(
                call.title,
                f"it {does} tokens that are {taken}, but those of {name} are {order or 'natural'}",
                "the tokens of the shuffle that it undoes, with the same arguments",
            )
        if made is not None:
            self._known[call.outputs[0]] = made

    def _take(self, call: Call, identifier: str, order: TokenOrder) -> None:
        assert call.rule is not None
        found = call.rule.orders[identifier].follow(order.order, call.arguments)
        if isinstance(found, str):
            raise order_error(call.title, f"its tokens are {order}, and {found}", _UNDO)
        for name in found.by:
            by = call.origin(name)
            if not self._same(by, order.by):
                raise order_error(
                    call.title,
                    f"its tokens are {order}, but {name} is another tensor, {_name(by)}",
                    f"the cu_seqlens that wrap_maybe_shuffle was given as {name}; or {_UNDO}",
                )
        call.take(order, found.arguments)

    def _agrees(self, order: TokenOrder | None, wanted: TokenOrder, dim: Any) -> bool:
        """Whether a tensor has the tokens at ``dim`` in the order ``wanted``; or, if ``dim`` is
        None, has them in no order."""
        if order is None or dim is None:
            return order is None and dim is None
        same = (order.dim, order.order) == (dim, wanted.order)
        return same and self._same(order.by, wanted.by)


def _name(value: Any) -> str:
    return str(getattr(value, "name", value))


def order_error(title: str, what: str, expected: str) -> PartitionError:
    """The error that an op, of this title, cannot take an order of tokens."""
    return PartitionError(what, details=[f"expected: {expected}"], op=title)
