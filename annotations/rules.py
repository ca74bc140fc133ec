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

Arguments = Mapping[str, Any]  # of an op, by name


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
        rounds: how many times in a row it moves something, in each pass.
    """

    what: str = ""
    forward_bytes: int = 0
    backward_bytes: int = 0
    imbalance: float = 1.0
    overlaps: bool = False
    rounds: int = 1


ShardArguments = Callable[[SplitSite], Arguments]
Cost = Callable[[BoundAnnotation, SplitSite, Arguments, int], InnerCost]


@dataclass(frozen=True)
class Communicates:
    """A split that communicates inside the op.

    A result that the split leaves whole (a mean over all tokens, say) is the same on every rank,
    and so is its gradient. But an all-reduce in the backward sums over all ranks, and engines sum
    the gradients of whole inputs: each would count that gradient once for each rank. So each rank's
    backward gets 1 / parts of it, which a backward derived from the function needs.

    Attributes:
        arguments: the shard's arguments of the op (its group, its layout), from the site.
        cost: what moves inside, from the bound annotation, the site, the op's arguments and the
            bytes of an element.
        whole_gradients: the op's own backward takes the whole gradient of such a result on every
            rank instead, and returns the right gradients itself: cut as their inputs, or partial
            sums of the gradients of whole inputs.
    """

    arguments: ShardArguments
    cost: Cost
    whole_gradients: bool = False


@dataclass(frozen=True)
class Told:
    """A split of a shard-aware op: it must know which part a rank holds; nothing moves inside.

    Attributes:
        arguments: the shard's arguments of the op, from the site.
        cost: as in :class:`Communicates`, if the parts are not equal work; else None.
    """

    arguments: ShardArguments
    cost: Cost | None = None


@dataclass(frozen=True, eq=False)
class Order:
    """An order of the positions of a sequence.

    Attributes:
        name: for plans, e.g. ``zigzag``.
        tokens: int64[n] numpy array: the position of the sequence at each index.
        move: an op that brings a tensor to the order where its positions are cut, and its text for
            the order; called with the tensor, None, that text, the dim of the positions, and
            whether to bring it back. None if there is none.
    """

    name: str
    tokens: Any
    move: tuple[str, str] | None = None

    @property
    def length(self) -> int:
        """The number of positions."""
        return len(self.tokens)

    def indices(self, outer: int, inner: int, back: bool) -> Any:
        """int64 array: the position at each index of a dim that is outer x sequence x inner; if
        ``back``, the index of each position."""
        tokens = np.argsort(self.tokens) if back else self.tokens
        within = tokens[:, None] * inner + np.arange(inner)
        return (np.arange(outer)[:, None] * within.size + within.reshape(-1)).reshape(-1)


@dataclass(frozen=True)
class LateOrder:
    """An order that depends on a tensor, such as lengths, whose value is known when a graph runs.

    Attributes:
        name: of the order; :attr:`Orders.follow` says which ops take it.
        length: the number of positions.
        by: name of the op's argument that it depends on; in a graph, of the node.
        make: name of an op that makes :meth:`Order.indices` from that tensor, ``name``, ``length``,
            ``outer``, ``inner``, ``back`` and a device's name.
        move: as in :class:`Order`; called with that tensor for None.
    """

    name: str
    length: int
    by: str
    make: str
    move: tuple[str, str] | None = None


@dataclass(frozen=True)
class Reorders:
    """An op that permutes positions if it is cut, and is the identity if not.

    A single-device program has natural order throughout. Where an engine cuts the op, the ops up to
    the one that restores natural order get the permuted positions: see :attr:`Orders.follow`.

    Attributes:
        identifier: that of the positions.
        orders: from the op's arguments to the names of the orders of its input and its result; None
            is natural. If both are the same, the op works in that order.
        by: name of the tensor argument that the order depends on, if it depends on one.
        natural: the arguments of an op that works in natural order.
    """

    identifier: str
    orders: Callable[[Arguments], tuple[str | None, str | None]]
    by: str | None = None
    natural: Arguments = field(default_factory=dict)

    def moves(self, given: Arguments) -> bool:
        """Whether a call takes or returns positions in another order than natural."""
        return self.orders(given) != (None, None)


@dataclass(frozen=True)
class Follow:
    """How an op runs on positions that :class:`Reorders` put in another order.

    Attributes:
        arguments: those that name the order.
        by: its tensor arguments that must equal the one that the order depends on.
    """

    arguments: Arguments
    by: tuple[str, ...]


@dataclass(frozen=True)
class Orders:
    """An identifier whose positions may come in another order, which the op's arguments name.

    So an engine may permute a sequence once, before the first op, and cut it then. (An op that is
    not shard-aware works in any order.)

    Attributes:
        wanted: an order whose contiguous parts are more even work, from the bound annotation, the
            site and the op's arguments; None if there is none.
        told: from the whole op's arguments and an order to the arguments that name the order; None
            if the op has none that can.
        cut: from the site and the whole op's arguments to further arguments of the shard, which
            override those of the rule.
        follow: from the name of an order of :class:`Reorders` or :class:`LateOrder` and the op's
            arguments, tensors by anything that stands for them, to how the op takes it, or why it
            cannot.
    """

    wanted: Callable[[BoundAnnotation, SplitSite, Arguments], Order | LateOrder | None]
    told: Callable[[Arguments, Order], Arguments | None]
    cut: Callable[[SplitSite, Arguments], Arguments] = lambda site, given: {}
    follow: Callable[[str, Arguments], Follow | str] = lambda name, given: (
        "the op does not take that order"
    )


@dataclass(frozen=True)
class PartitionRule:
    """Partition behaviour of an op.

    Attributes:
        communicates: by identifier, the splits that communicate inside the op.
        told: by identifier, those that do not, but whose part on a rank the op must know.
        flops: forward floating-point operations of the whole op from its bound annotation and
            arguments; None if the op is bound by memory.
        orders: those of ``communicates`` and ``told`` whose positions may come in another order.
        reorders: how the op permutes positions where it is cut; None if it does not.
        repeatable: arguments, integers [n], whose last element may be repeated without effect, such
            as cumulative lengths. An engine may pad them, so that one graph serves all lengths.
        varies: from the op's arguments to whether sizes of its results depend on tensors' values.
    """

    communicates: Mapping[str, Communicates] = field(default_factory=dict)
    flops: Callable[[BoundAnnotation, Arguments], float] | None = None
    told: Mapping[str, Told] = field(default_factory=dict)
    orders: Mapping[str, Orders] = field(default_factory=dict)
    reorders: Reorders | None = None
    repeatable: tuple[str, ...] = ()
    varies: Callable[[Arguments], bool] = lambda given: False

    @property
    def shard_aware(self) -> Mapping[str, Communicates | Told]:
        """The splits that the op must know, by identifier."""
        return {**self.communicates, **self.told}

    def divides_gradients(self, split: Split) -> tuple[bool, ...]:
        """For each result, whether a rank's backward gets 1 / parts of its gradient.

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

    def arguments(self, op: str, site: SplitSite, given: Arguments | None = None) -> Arguments:
        """The shard's arguments: those to replace in the op that ``site`` splits.

        Args:
            given: the whole op's arguments, which may name another order of its positions; None if
                they cannot.
        Raises:
            PartitionError: the split communicates and the site has no group.
        """
        name = site.identifier
        if site.parts == 1:
            return {}
        if name in self.communicates and name not in self.told and not site.group:
            raise PartitionError(
                f"a split of {name!r} over {site.parts} ranks communicates inside the op, but no "
                "process group was given; each rank alone would compute nonsense",
                op=op,
            )
        split = self.shard_aware.get(name)
        arguments = {} if split is None else split.arguments(site)
        if given is not None and name in self.orders:
            arguments = {**arguments, **self.orders[name].cut(site, given)}
        return arguments

    def cost(
        self, bound: BoundAnnotation, site: SplitSite, arguments: Arguments, itemsize: int
    ) -> InnerCost:
        """What the op that ``site`` splits moves inside, and how uneven its parts are.

        Args:
            arguments: the op's; tensors may be without data.
            itemsize: bytes of an element.
        """
        split = self.shard_aware.get(site.identifier)
        if split is None or split.cost is None:
            return InnerCost()
        return split.cost(bound, site, arguments, itemsize)
