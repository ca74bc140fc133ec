"""Choosing a strategy for every op: an integer linear program.

Each op takes exactly one strategy. Each way of reading a tensor costs the move from its producer's
placements to its reader's, and the move of its gradient back. A parameter is an op that chooses
how it is kept: whole, with its gradient summed over all ranks in ``sync_grad``; or sharded. Splits
that a policy forces, and the memory of a rank, are constraints.

The edge variables make the program nearly integral by itself, as in Alpa (Zheng et al.,
arXiv:2201.12023, 2022, section 4.2).

Equal layers share their variables. A block is all that the graph does under one module path up to
its first number (``blocks.3``). Blocks are equal if they do the same ops on the same shapes, wired
in the same way, and may run these in the same ways.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Node

from ..capture.capture import Captured
from ..capture.nodes import is_getitem, module_of, resolve, signature, tensor_inputs, values_of
from ..strategies.choices import Reading
from ..strategies.dtensor_probe import confirms
from ..strategies.op_strategies import Strategy
from ..strategies.placements import Placements, local_bytes
from .engine_cost import PlanCost, received_bytes
from .engine_plan import bytes_text
from .limits import Limits
from .solver import Infeasible, LinearProgram, PlanningError

Value = tuple[Node, int, tuple[tuple[Node, int], ...]]  # producer, index, readers with slots
# For two ops, one of which reads the other's result: a variable for each way to make and read it.
Pairs = dict[tuple[Placements, Reading], int]


def choose(limits: Limits, cost: PlanCost, mesh: DeviceMesh) -> dict[Node, Strategy]:
    """The cheapest strategies within ``limits``. Raises PlanningError where no plan fits into the
    budget, saying how much the smallest needs."""
    refused: set[tuple[Node, Strategy]] = set()
    while True:
        problem = _Problem(limits, cost, refused)
        chosen = problem.solve()
        # Strategies on several axes that DTensor can run on each of these, but not on all at once.
        wrong = {
            (node, s)
            for node, s in chosen.items()
            if sum(s.divided) > 1 and not s.local and not any(s.split)
            and node.op == "call_function" and not confirms(node, s.inputs, s.outputs, mesh)
        }  # fmt: skip
        if not wrong:
            return {node: chosen[like] for node, like in problem.like.items()}
        refused |= wrong


class _Problem:
    """The linear program of a graph: made from costs, and solved for strategies. ``like`` maps each
    op to the one that stands for it."""

    def __init__(self, limits: Limits, cost: PlanCost, refused: set[tuple[Node, Strategy]]) -> None:
        self._limits, self._cost, self._choices = limits, cost, cost.choices
        self.like = _representatives(self._choices.captured, limits.described())
        self._counts = Counter(self.like.values())
        self._options = {
            node: [s for s in limits.allowed(node) if (node, s) not in refused]
            for node in self._counts
        }
        self._program = LinearProgram()
        self._memory: list[tuple[int, float]] = []
        self._variables = {node: self._add_op(node) for node in self._counts}
        self._pairs: dict[tuple[Node, int, Node, int], Pairs] = {}
        for value, count in self._values().items():
            self._add_value(*value, count)
        if cost.budget.limit_bytes is not None:
            self._limit_memory(cost.budget.limit_bytes)

    def solve(self) -> dict[Node, Strategy]:
        try:
            solution = self._program.solve()
        except Infeasible:
            raise PlanningError(self._why_none()) from None
        return {
            node: options[int(np.argmax([solution[v] for v in self._variables[node]]))]
            for node, options in self._options.items()
        }

    def _add_op(self, node: Node) -> list[int]:
        """Add a variable for each strategy of an op, which takes exactly one."""
        cost, count, variables = self._cost, self._counts[node], []
        for s in self._options[node]:
            if node not in self._choices.parameters:
                seconds = cost.op_seconds(node, s)
                variables.append(self._program.add(count * seconds, binary=True))
                continue
            seconds = cost.sync_seconds(cost.sync_bytes(node, s))
            variables.append(self._program.add(count * seconds, binary=True))
            self._memory.append((variables[-1], count * sum(cost.parameter_bytes(node, s))))
        self._program.equal([(v, 1.0) for v in variables], 1.0)
        return variables

    def _values(self) -> Counter[Value]:
        """Each tensor with all of its readers, and the number of equal blocks that have it."""
        like = self.like
        readers: dict[tuple[Node, int], set[tuple[Node, int]]] = {}
        for edge in self._choices.edges:
            reader = (like[edge.consumer], edge.slot)
            readers.setdefault((edge.producer, edge.index), set()).add(reader)
        order = {node: n for n, node in enumerate(like)}
        return Counter(
            (like[p], index, tuple(sorted(r, key=lambda x: (order[x[0]], x[1]))))
            for (p, index), r in readers.items()
        )

    def _add_value(
        self, producer: Node, index: int, readers: Sequence[tuple[Node, int]], count: int
    ) -> None:
        """Add the cost of bringing a tensor to its readers, once for each way of reading it."""
        readings: dict[tuple[Placements, Reading], list[tuple[int, Node]]] = {}
        for reader, slot in readers:
            for way, variable in self._pair(producer, index, reader, slot).items():
                readings.setdefault(way, []).append((variable, reader))
        kept: dict[Placements, list[int]] = {}
        for (source, reading), pairs in readings.items():
            seconds = count * self._cost.move(producer, index, source, reading)[2]
            if seconds:
                self._program.cost[self._any([v for v, _ in pairs])] += seconds
            if source == reading[0] and producer in self._choices.parameters:
                continue  # counted as a parameter
            keepers = [v for v, r in pairs if self._cost.keeps(r)]
            kept.setdefault(reading[0], []).extend(keepers)
        if self._cost.budget.limit_bytes is not None:
            tensor = values_of(producer)[index]
            for target, keepers in kept.items():
                if keepers:
                    held = count * local_bytes(tensor, target, self._choices.parts)
                    self._memory.append((self._any(list(dict.fromkeys(keepers))), held))

    def _any(self, pairs: list[int]) -> int:
        """A variable that is 1 if any of ``pairs`` is."""
        if len(pairs) == 1:
            return pairs[0]
        shared = self._program.add(0.0)
        for pair in pairs:
            self._program.at_most([(pair, 1.0), (shared, -1.0)], 0.0)
        return shared

    def _pair(self, producer: Node, index: int, reader: Node, slot: int) -> Pairs:
        """A variable for each pair of a placement and a way to read it; the two marginals are the
        choices of the two ops."""
        key = (producer, index, reader, slot)
        if key in self._pairs:
            return self._pairs[key]
        left: dict[Placements, list[tuple[int, float]]] = {}
        right: dict[Reading, list[tuple[int, float]]] = {}
        for v, s in self._taking(producer):
            left.setdefault(s.outputs[index], []).append((v, -1.0))
        for v, s in self._taking(reader):
            right.setdefault((s.inputs[slot], s.grads[slot]), []).append((v, -1.0))
        as_kept = producer in self._limits.used_as_kept
        pairs = self._pairs[key] = {}
        for (p, of_left), (q, of_right) in itertools.product(left.items(), right.items()):
            if not as_kept or p == q[0]:
                pairs[p, q] = self._program.add(0.0)
                of_left.append((pairs[p, q], 1.0))
                of_right.append((pairs[p, q], 1.0))
        for terms in (*left.values(), *right.values()):
            self._program.equal(terms, 0.0)
        return pairs

    def _taking(self, node: Node) -> Iterator[tuple[int, Strategy]]:
        """The variables of an op, each with the strategy that it stands for."""
        return zip(self._variables[node], self._options[node], strict=True)

    def _limit_memory(self, limit_bytes: float) -> None:
        taking = itertools.chain.from_iterable(map(self._taking, self._options))
        passing = [(v, inside / 2**20) for v, s in taking if (inside := received_bytes(s))]
        if passing:
            most = self._program.add(0.0, upper=max(count for _, count in passing))
            for v, count in passing:
                self._program.at_most([(v, count), (most, -1.0)], 0.0)
            self._memory.append((most, 2.0**20))
        terms = [(v, count / 2**20) for v, count in self._memory]
        self._program.at_most(terms, limit_bytes / 2**20)

    def _why_none(self) -> str:
        """The error text if nothing fits: how much the smallest plan needs."""
        limit = self._cost.budget.limit_bytes
        if limit is not None:
            budget = replace(self._cost.budget, limit_bytes=float(2**60))
            free = _Problem(self._limits, replace(self._cost, budget=budget), set())
            program = free._program
            program.cost = [0.0] * len(program.cost)
            for v, count in free._memory:
                program.cost[v] += count / 2**40
            with contextlib.suppress(Infeasible):
                solution = program.solve()
                least = sum(solution[v] * count for v, count in free._memory)
                return (
                    f"no plan fits into {bytes_text(limit)} a rank (pas_config"
                    f"['memory_bytes']); the smallest is estimated to need {bytes_text(least)}. "
                    "More ranks, a shorter sequence, or a smaller "
                    "pas_config['optimizer_bytes_per_parameter'] help"
                )
        return "no plan satisfies all that the policy forces at once"


def _representatives(captured: Captured, limits: Mapping[Node, Hashable]) -> dict[Node, Node]:
    """Map each op to the one that stands for it, in the first of equal blocks; most ops stand for
    themselves. ``limits`` is what else two ops must have in common."""
    blocks: dict[str, list[Node]] = {}
    found: dict[Node, Node] = {}
    for node in captured.graph.nodes:
        if not is_getitem(node):
            found[node] = node
            path = captured.attributes.get(node.name, module_of(node))
            if numbered := re.match(r"(.*?\.)??\d+(?=\.|$)", path):
                blocks.setdefault(numbered[0], []).append(node)
    first: dict[Any, list[Node]] = {}
    for block, nodes in blocks.items():
        key = (block.rpartition(".")[0], _structure(block, nodes, captured, limits))
        found.update(zip(nodes, first.setdefault(key, nodes), strict=True))
    return found


def _structure(
    block: str, nodes: list[Node], captured: Captured, limits: Mapping[Node, Hashable]
) -> Hashable:
    place = {node: n for n, node in enumerate(nodes)}
    described = []
    for node in nodes:
        inputs = tensor_inputs(node)
        wired = tuple((place.get(resolve(x)[0]), resolve(x)[1]) for x in inputs)
        name = captured.attributes.get(node.name, "").removeprefix(block)
        described.append((signature(node, inputs), wired, name, limits.get(node)))
    return tuple(described)
