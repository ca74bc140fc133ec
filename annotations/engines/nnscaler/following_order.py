"""The order of tokens that a model's own shuffle puts them in, in an nnscaler graph.

A shuffle (:class:`~annotations.rules.Reorders`) is the identity in a single-device program, and
permutes tokens where it is cut. From there to the op that restores natural order, attention gets
the order as arguments. Takes nnscaler's nodes, but imports none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from annotations.errors import PartitionError
from annotations.rules import Orders, PartitionRule, Reorders

from .placement import leading

RuleOf = Callable[[Any], PartitionRule | None]
Original = Callable[[Any, str], Any]
_COPIES = ("clone", "to", "detach", "contiguous", "int", "long")  # of the same integers
_SHUFFLES = "wrap_maybe_shuffle", "wrap_maybe_unshuffle"
_THEIRS = (
    "it is nnscaler's own, whose order the attention of this package does not see",
    "from customized_ops.ring_attention import wrap_maybe_shuffle, wrap_maybe_unshuffle",
)
_UNDO = "natural order restored before it, as by wrap_maybe_unshuffle or wrap_unshuffle_func"


@dataclass(frozen=True)
class _Held:
    """Attributes:
    dim: of a tensor, where the tokens are. order: its name. by: what it depends on.
    """

    dim: int
    order: str
    by: Any

    def __str__(self) -> str:
        by = "" if self.by is None else f" ({getattr(self.by, 'name', self.by)})"
        return f"{self.order}{by}"


class TokenOrders:
    """What a graph of whole ops has in another order than natural.

    Attributes:
        shuffles, takers: the ops that make, take or restore an order, and those whose arguments
            must name it, by first result. orders: what these must name.
        problem: the first op that cannot take its operands' order; an error only where the
            shuffles are cut.
    """

    def __init__(
        self, nodes: Sequence[Any], outputs: Sequence[Any], rule_of: RuleOf, original: Original
    ) -> None:
        """
        Args:
            nodes: in order of execution. outputs: of the graph.
            rule_of: the rule of one of our ops, None for others.
            original: from a node and the name of an argument of its op to the call's own.
        """
        self.shuffles: dict[Any, Any] = {}
        self.takers: dict[Any, Any] = {}
        self.orders: dict[Any, str] = {}
        self.problem: PartitionError | None = None
        self._held: dict[Any, _Held] = {}
        self._copied: dict[Any, Any] = {}  # from a copy of integers to what it was made from
        self._rule_of, self._original = rule_of, original
        theirs = [node for node in nodes if node.name in _SHUFFLES and rule_of(node) is None]
        if theirs and any(map(rule_of, nodes)):
            raise _error(theirs[0], *_THEIRS)
        try:
            for node in nodes:
                self._visit(node)
            for tensor in _tensors_in(outputs):
                if tensor.parent in self._held:
                    held = self._held[tensor.parent]
                    raise _error(None, f"the module returns tokens that are {held}", _UNDO)
        except PartitionError as error:
            self.problem = error
        for node in nodes:  # also those behind the problem
            if self._reorders(node) is not None:
                self.shuffles[_whole(node.outputs()[0])] = node

    def _reorders(self, node: Any) -> Reorders | None:
        rule = self._rule_of(node)
        found = None if rule is None else rule.reorders
        given = _Arguments(node, self._original)
        return found if found is not None and found.moves(given) else None

    def _visit(self, node: Any) -> None:
        rule = self._rule_of(node)
        tensors = [t for t in node.inputs() if _is_tensor(t)]
        held = [self._held.get(_whole(t)) for t in tensors]
        reorders = self._reorders(node)
        if reorders is not None:
            self._shuffle(node, reorders, held[0])
            return
        first = next((h for h in held if h is not None), None)
        if first is None:
            if node.name in _COPIES and len(tensors) == 1:
                whole = _whole(tensors[0])
                self._copied[_whole(node.outputs()[0])] = self._copied.get(whole, whole)
            return
        annotation = getattr(node, "anno", None)
        name = None if annotation is None else self._identifier(node, first)
        takes = rule is not None and bool(rule.orders)
        free = takes and name in rule.orders  # type: ignore[union-attr]
        if name is None or not (free or (not takes and self._is_free(node, rule, name))):
            raise _error(
                node,
                f"it mixes tokens or depends on their places, and its input's are {first}",
                f"{_UNDO}, or an op that works token by token",
            )
        wanted = [_dim(shape, t, name) for shape, t in self._annotated(node.anno.inputs(), node)]
        for dim, has in zip(wanted, held, strict=True):
            if has != (None if dim is None else replace(first, dim=dim)):
                raise _error(
                    node,
                    f"its operands have tokens in different orders: {first} and {has or 'natural'}",
                    "all operands that have the tokens in one order, through the same shuffle",
                )
        if takes:
            self._tell(node, rule.orders[name], first)  # type: ignore[union-attr,index]
        for shape, tensor in zip(node.anno.outputs(), node.outputs(), strict=True):
            dim = _dim(shape, tensor, name) if _is_tensor(tensor) else None
            if dim is not None:
                self._held[_whole(tensor)] = replace(first, dim=dim)

    def _annotated(self, shapes: Sequence[Any], node: Any) -> list[tuple[Any, Any]]:
        pairs = zip(shapes, node.inputs(), strict=True)
        return [(shape, tensor) for shape, tensor in pairs if _is_tensor(tensor)]

    def _identifier(self, node: Any, first: _Held) -> str | None:
        """What the tokens are called in a node's annotation, None if they are part of a dim."""
        for shape, tensor in self._annotated(node.anno.inputs(), node):
            held = self._held.get(_whole(tensor))
            if held == first:
                name = None if shape.ignore else leading(shape.dims[held.dim])
                shapes = [s for s in (*node.anno.inputs(), *node.anno.outputs()) if not s.ignore]
                dims = [dim for s in shapes for dim in s.dims if name in dim.identifiers]
                alone = all([x for x in dim.identifiers if x != "1"] == [name] for dim in dims)
                return name if alone and name != "1" else None
        return None

    def _is_free(self, node: Any, rule: PartitionRule | None, name: str) -> bool:
        if rule is not None and name in {**rule.communicates, **rule.told}:
            return False
        cuts = node.transform_space()
        return any(leading(node.anno.input(n).dims[dim]) == name for n, dim in cuts)

    def _shuffle(self, node: Any, rule: Reorders, held: _Held | None) -> None:
        dim = _dim(node.anno.inputs()[0], node.inputs()[0], rule.identifier)
        if dim is None:
            what = "ranks would hold other numbers of tokens after it than before"
            raise _error(node, what, "a layout that leaves each rank as many, such as 'zigzag'")
        by = None if rule.by is None else self._origin(node, rule.by)
        orders = rule.orders(_Arguments(node, self._original))
        taken, made = (None if order is None else _Held(dim, order, by) for order in orders)
        if taken is None and held is not None:
            raise _error(node, f"its tokens are {held} already", _UNDO)
        if taken is not None and held != taken:
            does = "works on" if made is not None else "restores natural order of"
            raise _error(
                node,
                f"it {does} tokens that are {taken}, but its input's are {held or 'natural'}",
                "the tokens of the shuffle that it undoes, with the same arguments",
            )
        if made is not None:
            self._held[_whole(node.outputs()[0])] = made

    def _origin(self, node: Any, name: str) -> Any:
        """An argument of a call; of a copy, what it was made from."""
        value = self._original(node, name)
        return self._copied.get(value, value) if hasattr(value, "tid") else value

    def _tell(self, node: Any, orders: Orders, held: _Held) -> None:
        found = orders.follow(held.order, _Arguments(node, self._original))
        if isinstance(found, str):
            raise _error(node, f"its tokens are {held}, and {found}", _UNDO)
        for name in found.by:
            by = self._origin(node, name)
            if by != held.by:
                raise _error(
                    node,
                    f"its tokens are {held}, but {name} is another tensor, "
                    f"{getattr(by, 'name', by)}",
                    f"the cu_seqlens that wrap_maybe_shuffle was given as {name}; or {_UNDO}",
                )
        self.takers[_whole(node.outputs()[0])] = node
        self.orders[_whole(node.outputs()[0])] = held.order

    def check(self, groups: Mapping[Any, frozenset[tuple[int, ...]]]) -> bool:
        """Whether the shuffles are cut, so that attention must name their order.

        Args:
            groups: by the first result of our ops, the ranks that share its tokens.
        Raises:
            PartitionError: some are, others not; or an op cannot take its operands' order.
        """
        shuffled = {groups[whole] for whole in self.shuffles}
        if not any(shuffled):
            return False
        if self.problem is not None:
            raise self.problem
        for whole, node in {**self.shuffles, **self.takers}.items():
            if groups[whole] not in shuffled or len(shuffled) > 1:
                shown = [list(map(list, sorted(g))) or "nowhere" for g in shuffled]
                raise _error(
                    node,
                    f"tokens are shuffled over the ranks {' and '.join(map(str, shown))}, and it "
                    f"is cut on them over {list(map(list, sorted(groups[whole]))) or 'none'}",
                    "every shuffle, and all attention in its order, cut on 'l' over the same ranks",
                )
        return True


class _Arguments(Mapping[str, Any]):
    """The arguments of a node's call, by their names in the op."""

    def __init__(self, node: Any, original: Any) -> None:
        self._node, self._original = node, original

    def __getitem__(self, name: str) -> Any:
        return self._original(self._node, name)

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "indmap")


def _tensors_in(value: Any) -> Iterator[Any]:
    """Those of results, in whatever containers."""
    if _is_tensor(value):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, Sequence | set) and not isinstance(value, str):
        for each in value:
            yield from _tensors_in(each)
    elif hasattr(value, "value") and value.value is not value:  # a constant, or what holds one
        yield from _tensors_in(value.value)


def _whole(tensor: Any) -> Any:
    return tensor.parent


def _dim(shape: Any, tensor: Any, name: str) -> int | None:
    if shape.ignore:
        return None
    return next((n for n, dim in enumerate(shape.dims) if leading(dim) == name), None)


def _error(node: Any, what: str, expected: str) -> PartitionError:
    if node is None:
        return PartitionError(what, details=[f"expected: {expected}"], op="the module's results")
    where = getattr(node, "fqn", "") or "the module"
    return PartitionError(what, details=[f"expected: {expected}"], op=f"{node.name} in {where}")
