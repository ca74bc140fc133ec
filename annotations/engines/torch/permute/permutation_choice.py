"""Which ops of a graph run in another order of a sequence, and which in natural order.

Each op is on one side or the other. A tensor that passes between the sides costs a permutation, and
attention in natural order costs the time that the other order would save. The cheapest division is
a minimum cut, solved here as a linear program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array
from torch.fx import Graph, Node

from annotations.rules import LateOrder, Order

from ..capture.nodes import is_getitem, resolve, tensor_inputs
from ..rates import Rates, received_seconds
from .permuted_graph import moves_parts
from .token_axes import Along, SequenceDim, along

# Time to start one permutation on a device. It keeps them few where bytes do not matter.
PERMUTE_SECONDS = 1e-5

OpResult = tuple[Node, int]  # an op, and the index of one of its results
Readers = Mapping[OpResult, Sequence[tuple[Node, int]]]


def readers_of(graph: Graph) -> Readers:
    """The readers of each result, each with the number of the tensor input that the result is."""
    found: dict[OpResult, list[tuple[Node, int]]] = {}
    for node in graph.nodes:
        if not is_getitem(node):
            for slot, value in enumerate(tensor_inputs(node)):
                found.setdefault(resolve(value), []).append((node, slot))
    return found


def follow(
    readers: Readers, start: Sequence[Node], own: Mapping[Node, Along], length: int
) -> dict[Node, Along]:
    """How ops go along a sequence, followed from op to op, for every op that can.

    Args:
        start: the ops to start from.
        own: how ops whose arguments name the sequence's order go along it.
    """
    ways = {node: own[node] for node in start}
    queue = list(start)

    def reach(node: Node, at: SequenceDim, slot: int, index: int) -> None:
        if node in ways:
            return
        way = own.get(node) or along(node, at, length, slot=slot, index=index)
        if way is not None and (way.inputs[slot] if slot >= 0 else way.outputs[index]) == at:
            ways[node] = way
            queue.append(node)

    for node in queue:
        for value, at in zip(tensor_inputs(node), ways[node].inputs, strict=True):
            producer, index = resolve(value)
            if at is not None:
                reach(producer, at, -1, index)
        for index, at in enumerate(ways[node].outputs):
            for reader, slot in readers.get((node, index), ()):
                if at is not None:
                    reach(reader, at, slot, 0)
    return ways


@dataclass(frozen=True, eq=False)
class TensorPermutation:
    """A permutation that is needed if ops on either side read a tensor.

    Attributes:
        value: what is permuted. back: whether to natural order.
        source: the op on whose side the tensor is; None for a tensor that is in natural order.
        readers: the ops that want it in the order of their side; None for one that always wants
            natural order.
        seconds: forward and backward.
    """

    value: Node
    back: bool
    source: Node | None
    readers: Sequence[Node | None]
    seconds: float


@dataclass(frozen=True, eq=False)
class PermutationChoice:
    """The choice of a side for each op.

    Attributes:
        ways: the ops that have a choice.
        order: the new order.
        gains: seconds that an op saves in the new order, for ops where that is known; negative if
            it takes longer.
        parts: ranks that activations are cut over.
        forced: for ops that have no choice, whether they run in the new order.
    """

    readers: Readers
    ways: Mapping[Node, Along]
    order: Order | LateOrder
    gains: Mapping[Node, float]
    parts: int
    rates: Rates
    forced: Mapping[Node, bool]

    @cached_property
    def moves(self) -> list[TensorPermutation]:
        """Every permutation that might be needed. If several would do at the same cost, the one
        nearest to the inputs is a little cheaper."""
        moves: list[TensorPermutation] = []
        for (producer, index), users in self.readers.items():
            way = self.ways.get(producer)
            held = None if way is None else way.outputs[index]
            reader, slot = users[0]
            found = self._moves_of(tensor_inputs(reader)[slot], producer, held, users)
            later = PERMUTE_SECONDS * len(moves) / (100 * len(self.readers))
            moves += [replace(move, seconds=move.seconds + later) for move in found]
        return moves

    def _moves_of(
        self,
        value: Node,
        producer: Node,
        held: SequenceDim | None,
        users: Sequence[tuple[Node, int]],
    ) -> list[TensorPermutation]:
        """The permutations that might be needed of one result."""
        wants: dict[SequenceDim, list[Node | None]] = {}
        for reader, slot in users:
            at = self._wanted(reader, slot)
            if at is not None:
                wants.setdefault(at, []).append(reader)
        cut = producer.op != "placeholder"
        moves = [
            TensorPermutation(
                value,
                False,
                producer if at == held else None,
                asking,
                self._seconds(value, at, cut),
            )
            for at, asking in wants.items()
        ]
        if held is None:
            return moves
        seconds = self._seconds(value, held, cut)
        if any(reader.op == "output" for reader, _ in users):
            whole = self._seconds(value, held, False)
            moves.append(TensorPermutation(value, True, producer, [None], whole))
        back = wants.get(held, [])
        if any(r.op != "output" and self._wanted(r, slot) != held for r, slot in users):
            back = [*back, None]
        return [*moves, TensorPermutation(value, True, producer, back, seconds)] if back else moves

    def _wanted(self, reader: Node, slot: int) -> SequenceDim | None:
        way = self.ways.get(reader)
        return None if way is None else way.inputs[slot]

    def _seconds(self, value: Node, at: SequenceDim, cut: bool) -> float:
        """Seconds to permute a tensor, and its gradient back. A sharded tensor is gathered, unless
        the order has an op that moves parts."""
        tensor = value.meta["val"]
        size, both = tensor.numel() * tensor.element_size(), 1 + tensor.is_floating_point()
        received = size * (self.parts - 1) / self.parts if cut and both == 2 else 0.0
        if cut and moves_parts(self.order, value, at):
            received, size = size * self._received_share, size / self.parts
        seconds = PERMUTE_SECONDS + both * 2 * size / self.rates.memory_bytes_per_second
        return seconds + both * received_seconds(received, self.rates.link(0))

    @cached_property
    def _received_share(self) -> float:
        """The share of all tokens that the busiest rank receives to have its part of the new order;
        at worst all of its part."""
        each = -(-self.order.length // self.parts)
        if isinstance(self.order, LateOrder):
            return each / max(self.order.length, 1)
        here = np.arange(self.order.length) // each
        comes = here[self.order.tokens // each != here]
        return float(np.bincount(comes, minlength=1).max()) / self.order.length

    @property
    def seconds(self) -> float:
        """Seconds by which the cheapest choice is slower than natural order everywhere; negative if
        it is faster."""
        gained = sum(gain for node, gain in self.gains.items() if self.sides[node])
        return sum(move.seconds for move in self.made) - gained

    @property
    def done(self) -> bool:
        """Whether an op for which it matters runs in the new order."""
        return any(self.sides[node] for node in self.gains)

    @property
    def made(self) -> list[TensorPermutation]:
        """The permutations that the cheapest choice needs."""

        def needed(move: TensorPermutation) -> bool:
            here = move.source is not None and self.sides[move.source]
            there = [reader is not None and self.sides[reader] for reader in move.readers]
            return here and not all(there) if move.back else not here and any(there)

        return [move for move in self.moves if needed(move)]

    @cached_property
    def sides(self) -> dict[Node, bool]:
        """Whether each op runs in the new order, in the cheapest choice.

        With x = 1 for an op in the new order, a move is made if x differs between its source and
        one of its readers. Such constraints are differences, so every vertex is integral.
        """
        if not self.ways:
            return {}
        number = {node: n for n, node in enumerate(self.ways)}
        cost = [-self.gains.get(node, 0.0) for node in number]
        low = [float(self.forced.get(node, False)) for node in number]
        high = [float(self.forced.get(node, True)) for node in number]
        rows: list[tuple[int, int, float]] = []
        n_rows = 0
        for move in self.moves:
            for reader in move.readers:
                # made >= reader - source, or for a move back made >= source - reader
                sign = -1.0 if move.back else 1.0
                rows.append((n_rows, len(cost), -1.0))
                if reader is not None:
                    rows.append((n_rows, number[reader], sign))
                if move.source is not None:
                    rows.append((n_rows, number[move.source], -sign))
                n_rows += 1
            cost.append(move.seconds)
        bounds = [*zip(low, high, strict=True), *[(0.0, 1.0)] * (len(cost) - len(low))]
        at_row, at_column, values = zip(*rows, strict=True)
        solved = linprog(
            np.array(cost) / max(map(abs, cost)),
            A_ub=coo_array((values, (at_row, at_column)), shape=(n_rows, len(cost))).tocsr(),
            b_ub=np.zeros(n_rows),
            bounds=bounds,
            method="highs-ds",
        )
        assert solved.x is not None, solved.message
        return {node: bool(solved.x[n] > 0.5) for node, n in number.items()}
