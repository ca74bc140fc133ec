"""What a split of an op means beyond its annotation: whether it communicates inside, at what cost.

An annotation says which dims may be cut. After most cuts each rank runs the op on its part. Some
cut what the op needs whole (attention's sequence), and the op then communicates inside. A rule
declares those, so that an engine can pass the op its group, and cost the split, without knowing
what the op does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .binding import BoundAnnotation, Split, Spread
from .errors import PartitionError


@dataclass(frozen=True)
class SplitSite:
    """How one identifier is split, and which part a rank holds.

    Attributes:
        identifier: e.g. ``l``.
        size: its whole size.
        parts: number of ranks it is cut over; each holds ceil(size / parts) of it, as DTensor's
            ``Shard`` cuts, so the last ranks may hold less.
        group: name of the process group of these ranks, ``""`` if there is none.
        index: the part that this rank holds; 0 for costs.
        ranks: global ranks of the parts in order, if the engine knows them.
    """

    identifier: str
    size: int
    parts: int
    group: str
    index: int = 0
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class InnerCost:
    """What a split op moves inside, for the busiest rank.

    Attributes:
        what: short text for plans, e.g. ``k, v``.
        forward_bytes, backward_bytes: received by the rank that receives most.
        imbalance: largest rank's work over the mean.
        overlaps: whether the op computes meanwhile.
    """

    what: str = ""
    forward_bytes: int = 0
    backward_bytes: int = 0
    imbalance: float = 1.0
    overlaps: bool = False


Arguments = Callable[[SplitSite], Mapping[str, Any]]
Cost = Callable[[BoundAnnotation, SplitSite, Mapping[str, Any], int], InnerCost]


@dataclass(frozen=True)
class Communicates:
    """A split that communicates inside the op.

    A result that the split leaves whole (a mean over all tokens, say) is the same on every rank,
    and so is its gradient. But an all-reduce in the backward sums over all ranks, and engines sum
    the gradients of whole inputs: each would count that gradient once a rank. So each rank's
    backward gets 1 / parts of it, which a backward derived from the function needs.

    Attributes:
        arguments: the shard's arguments of the op (its group, its layout) by name, from the site.
        cost: what moves inside, from the bound annotation, the site, the op's arguments by name and
            the bytes of an element.
        whole_gradients: the op's own backward takes the whole gradient of such a result on every
            rank instead, and returns the right gradients itself: cut as their inputs, or partial
            sums of the gradients of whole inputs.
    """

    arguments: Arguments
    cost: Cost
    whole_gradients: bool = False


@dataclass(frozen=True)
class Told:
    """A split of a shard-aware op: it must know which part a rank holds; nothing moves inside.

    Attributes:
        arguments: the shard's arguments of the op by name, from the site.
        cost: as of :class:`Communicates`, if the parts are not equal work; else None.
    """

    arguments: Arguments
    cost: Cost | None = None


@dataclass(frozen=True, eq=False)
class Order:
    """An order of the positions of a sequence.

    Attributes:
        name: for plans, e.g. ``zigzag``.
        tokens: int64[n] numpy array: the position of the sequence at each index.
    """

    name: str
    tokens: Any

    @property
    def length(self) -> int:
        """How many positions there are."""
        return len(self.tokens)

    def indices(self, outer: int, inner: int, back: bool) -> Any:
        """int64 array: of a dim that is outer x sequence x inner, which of its positions stands at
        each index; if ``back``, where each position stands."""
        tokens = np.argsort(self.tokens) if back else self.tokens
        within = tokens[:, None] * inner + np.arange(inner)
        return (np.arange(outer)[:, None] * within.size + within.reshape(-1)).reshape(-1)


@dataclass(frozen=True)
class LateOrder:
    """An order that depends on a tensor whose value is known when a graph runs, as of lengths.

    Attributes:
        name: as :class:`Reorders` names orders; :attr:`Orders.follow` says which ops take it.
        length: how many positions there are.
        by: name of the op's argument that it depends on; in a graph, of the node.
        make: name of an op that makes :meth:`Order.indices` of that tensor, ``name``, ``length``,
            ``outer``, ``inner``, ``back`` and a device's name.
    """

    name: str
    length: int
    by: str
    make: str


@dataclass(frozen=True)
class Reorders:
    """An op that puts positions in another order where it is cut, and is the identity where not.

    A single-device program has natural order throughout. So where an engine cuts the op, all that
    depends on the order, up to the op that restores it, must follow: see :attr:`Orders.follow`.

    Attributes:
        identifier: of the positions.
        orders: from the op's arguments by name to the names of the orders that it takes positions
            in and returns them in; None is natural. Both the same: it works in that order.
        by: name of the tensor argument that the order depends on, if it depends on one.
        natural: the arguments, by name, of an op that works in natural order.
    """

    identifier: str
    orders: Callable[[Mapping[str, Any]], tuple[str | None, str | None]]
    by: str | None = None
    natural: Mapping[str, Any] = field(default_factory=dict)

    def moves(self, given: Mapping[str, Any]) -> bool:
        """Whether a call takes or returns positions in another order than natural."""
        return self.orders(given) != (None, None)


@dataclass(frozen=True)
class Follow:
    """How an op runs on positions that :class:`Reorders` put in another order.

    Attributes:
        arguments: those that tell it, by name.
        by: its tensor arguments that must equal the one that the order depends on.
    """

    arguments: Mapping[str, Any]
    by: tuple[str, ...]


def _cannot_follow(name: str, given: Mapping[str, Any]) -> str:
    return "the op does not take that order"


@dataclass(frozen=True)
class Orders:
    """An identifier whose positions may come in another order, which the op's arguments name.

    So an engine may permute a sequence once, before the first op, and cut it then. (An op that is
    not shard-aware works in any order.)

    Attributes:
        wanted: an order whose contiguous parts are more even work, from the bound annotation, the
            site and the op's arguments by name; None if there is none.
        told: from the op's arguments and an order to the arguments, by name, that say the order to
            the whole op; None if the op has none that can.
        cut: from the site and the whole op's arguments to further shard's arguments, over those of
            the rule.
        follow: from the name of an order of :class:`Reorders` or :class:`LateOrder` and the op's
            arguments by name, tensors by anything that stands for them, to how the op takes it, or
            why it cannot.
    """

    wanted: Callable[[BoundAnnotation, SplitSite, Mapping[str, Any]], Order | LateOrder | None]
    told: Callable[[Mapping[str, Any], Order], Mapping[str, Any] | None]
    cut: Callable[[SplitSite, Mapping[str, Any]], Mapping[str, Any]] = lambda site, given: {}
    follow: Callable[[str, Mapping[str, Any]], Follow | str] = _cannot_follow


@dataclass(frozen=True)
class PartitionRule:
    """Partition behaviour of an op.

    Attributes:
        communicates: identifiers whose split communicates inside the op.
        told: identifiers whose split does not, but whose part on a rank the op must know.
        flops: forward floating-point operations of the whole op from its bound annotation and
            arguments; None if the op is bound by memory.
        orders: those of ``communicates`` and ``told`` whose positions may come in another order.
        reorders: what order the op puts positions in where it is cut; None if in none.
        repeatable: arguments, integers [n], whose last element may be repeated and nothing changes,
            as of cumulative lengths. An engine may fill them up, so that one graph serves.
    """

    communicates: Mapping[str, Communicates] = field(default_factory=dict)
    flops: Callable[[BoundAnnotation, Mapping[str, Any]], float] | None = None
    told: Mapping[str, Told] = field(default_factory=dict)
    orders: Mapping[str, Orders] = field(default_factory=dict)
    reorders: Reorders | None = None
    repeatable: tuple[str, ...] = ()

    def divides_gradients(self, split: Split) -> tuple[bool, ...]:
        """Whether a rank's backward gets 1 / parts of the gradient, of each result.

        It does if every rank computes the result whole, unless the op takes whole gradients, or no
        input's gradient is summed over the ranks, inside the op or after it.
        """
        inside = self.communicates.get(split.identifier)
        if inside is not None:
            added_up = not inside.whole_gradients
        else:
            inputs = zip(split.inputs, split.grad_reduce, strict=True)
            added_up = any(cut is Spread.REPLICATE and reduce for cut, reduce in inputs)
        return tuple(added_up and cut is Spread.REPLICATE for cut in split.outputs)

    def arguments(
        self, op: str, site: SplitSite, given: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any]:
        """The shard's arguments: those to replace in the op that ``site`` splits.

        Args:
            given: the whole op's arguments by name, which may name another order of its positions;
                None if they cannot.
        Raises:
            PartitionError: the split communicates and the site has no group.
        """
        arguments = self._arguments(op, site)
        if given is not None and site.parts > 1 and site.identifier in self.orders:
            arguments = {**arguments, **self.orders[site.identifier].cut(site, given)}
        return arguments

    def _arguments(self, op: str, site: SplitSite) -> Mapping[str, Any]:
        if site.parts == 1:
            return {}
        if site.identifier in self.told:
            return self.told[site.identifier].arguments(site)
        if site.identifier not in self.communicates:
            return {}
        if not site.group:
            raise PartitionError(
                f"a split of {site.identifier!r} over {site.parts} ranks communicates inside the "
                "op, but no process group was given; each rank alone would compute nonsense",
                op=op,
            )
        return self.communicates[site.identifier].arguments(site)

    def cost(
        self, bound: BoundAnnotation, site: SplitSite, arguments: Mapping[str, Any], itemsize: int
    ) -> InnerCost:
        """What the op that ``site`` splits moves inside, and how uneven its parts are.

        Args:
            arguments: the op's, by name; tensors may be without data.
            itemsize: bytes of an element.
        """
        split = self.communicates.get(site.identifier) or self.told.get(site.identifier)
        if split is None or split.cost is None:
            return InnerCost()
        return split.cost(bound, site, arguments, itemsize)


def check_parts(bound: BoundAnnotation, split: Split, parts: int) -> None:
    """Refuse a cut through inner dims.

    A dim of one name may be cut unevenly. ``(g 4)`` may not: its parts must be multiples of 4 that
    match the parts of ``g`` elsewhere.

    Raises:
        PartitionError: ``split`` is inside brackets somewhere and ``parts`` does not divide it.
    """
    shapes = (*bound.annotation.inputs, *bound.annotation.outputs)
    inners = (dim for shape in shapes for dim in shape.dims if len(dim.identifiers) > 1)
    inner = next((dim for dim in inners if split.identifier in dim.identifiers), None)
    if inner is not None and not bound.divisible(split.identifier, parts):
        raise PartitionError(
            f"{split.identifier!r} = {bound.sizes[split.identifier]} cannot be cut over {parts} "
            "ranks",
            bound.annotation.text,
            inner.span,
            ["it is part of an inner dim, so the number of ranks must divide it"],
            bound.op,
        )
