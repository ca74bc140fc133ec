"""Choosing a strategy for every op: an integer linear program.

Each op takes exactly one strategy; each tensor pays, for each way in which it is read, to be
brought there from how its producer leaves it, and its gradient to be brought back. A parameter is
an op that chooses how it is kept: whole, its gradient then added up over all ranks in
``sync_grad``; or in parts. Splits that a policy forces, and the memory of a rank, are constraints.

The edge variables make the program nearly integral by itself, as in Alpa (Zheng et al.,
arXiv:2201.12023, 2022, section 4.2). Equal layers share their variables.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Node

from ..capture.nodes import value_of
from ..strategies.choices import Choices, Reading, move_steps
from ..strategies.dtensor_probe import confirms
from ..strategies.op_strategies import Strategy
from ..strategies.placements import Places, local_bytes
from .engine_cost import Rates, all_reduce_bytes, compute_seconds, steps_seconds
from .limits import Limits
from .memory import Budget, keeps, parameter_bytes, passing_bytes
from .repeats import representatives
from .solver import Infeasible, LinearProgram, PlanningError


def choose(
    choices: Choices, limits: Limits, rates: Rates, budget: Budget, mesh: DeviceMesh
) -> dict[Node, Strategy]:
    """The cheapest strategies within ``limits``.

    Raises:
        PlanningError: no plan fits into the budget; says how much the smallest needs.
    """
    refused: set[tuple[Node, Strategy]] = set()
    while True:
        problem = _Problem(choices, limits, rates, budget, refused)
        chosen = problem.solve()
        wrong = _refused_by_dtensor(problem.like, chosen, mesh)
        if not wrong:
            return {node: chosen[like] for node, like in problem.like.items()}
        refused |= wrong


def _refused_by_dtensor(
    like: Mapping[Node, Node], chosen: Mapping[Node, Strategy], mesh: DeviceMesh
) -> set[tuple[Node, Strategy]]:
    """Strategies on several axes that DTensor runs on each of them, but not on all at once."""
    if mesh.ndim == 1:
        return set()
    return {
        (node, s)
        for node, s in chosen.items()
        if like[node] is node and sum(s.divided) > 1 and not s.local and not any(s.split)
        and node.op == "call_function" and not confirms(node, s.inputs, s.outputs, mesh)
    }  # fmt: skip


@dataclass
class _Value:
    """A tensor and all that read it, of one of several equal blocks.

    Attributes:
        count: in how many blocks it is read so.
        readings: for each way in which it may come to be read so, a variable for each reader.
    """

    producer: Node
    index: int
    count: int
    readers: tuple[tuple[Node, int], ...]
    readings: dict[tuple[Places, Reading], list[tuple[int, Node]]] = field(default_factory=dict)


class _Problem:
    """The linear program of a graph, from costs to the strategies that its solution means."""

    def __init__(
        self,
        choices: Choices,
        limits: Limits,
        rates: Rates,
        budget: Budget,
        refused: set[tuple[Node, Strategy]],
    ) -> None:
        self._choices, self._limits = choices, limits
        self._rates, self._budget = rates, budget
        self.like = representatives(choices.captured, limits.described())
        self._counts = Counter(self.like.values())
        self._options = {
            node: [s for s in limits.allowed(node, choices) if (node, s) not in refused]
            for node in self._counts
        }
        self._program = LinearProgram()
        self._memory: list[tuple[int, float]] = []
        self._variables = {node: self._add_op(node) for node in self._counts}
        self._pairs: dict[tuple[Node, int, Node, int], dict[tuple[Places, Reading], int]] = {}
        for value in self._values():
            self._add_value(value)
        if budget.limit_bytes is not None:
            self._limit_memory()

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
        """A variable for each strategy, of which one is taken."""
        choices, count = self._choices, self._counts[node]
        variables = []
        for s in self._options[node]:
            if node in choices.parameters:
                variable = self._program.add(count * self._sync_seconds(node, s), binary=True)
                stored, read = choices.stored[node], node.meta["val"]
                held = parameter_bytes(stored, read, s.outputs[0], choices.parts, self._budget)
                self._memory.append((variable, count * sum(held)))
            else:
                differentiated = choices.differentiated[node]
                seconds = compute_seconds(node, s, choices.parts, self._rates, differentiated)
                variable = self._program.add(count * seconds, binary=True)
            variables.append(variable)
        self._program.equal([(v, 1.0) for v in variables], 1.0)
        return variables

    def _sync_seconds(self, node: Node, strategy: Strategy) -> float:
        """To add up what is left of a parameter's gradient after the backward."""
        choices = self._choices
        if not choices.differentiated[node]:
            return 0.0
        count = local_bytes(choices.stored[node], strategy.outputs[0], choices.parts)
        whole = not any(strategy.divided)
        ranks = choices.copies * (int(np.prod(choices.parts)) if whole else 1)
        # Many gradients travel together, so that each pays nothing to start.
        return all_reduce_bytes(count, ranks) / self._rates.link(-1).bytes_per_second

    def _values(self) -> list[_Value]:
        like = self.like
        readers: dict[tuple[Node, int], set[tuple[Node, int]]] = {}
        for edge in self._choices.edges:
            reader = (like[edge.consumer], edge.slot)
            readers.setdefault((edge.producer, edge.index), set()).add(reader)
        order = {node: n for n, node in enumerate(like)}
        counts = Counter(
            (like[p], index, tuple(sorted(r, key=lambda x: (order[x[0]], x[1]))))
            for (p, index), r in readers.items()
        )
        return [_Value(p, index, count, r) for (p, index, r), count in counts.items()]

    def _add_value(self, value: _Value) -> None:
        """What it costs to bring a tensor to each of its readers: each way of reading it once."""
        for reader, slot in value.readers:
            for way, variable in self._pair(value, reader, slot).items():
                value.readings.setdefault(way, []).append((variable, reader))
        kept: dict[Places, list[int]] = {}
        for (source, (target, grad)), pairs in value.readings.items():
            seconds = value.count * self._move_seconds(value, source, target, grad)
            if seconds:
                self._program.cost[self._any([v for v, _ in pairs])] += seconds
            if source == target and value.producer in self._choices.parameters:
                continue  # counted as a parameter
            keepers = [v for v, r in pairs if keeps(r, self._choices.differentiated)]
            kept.setdefault(target, []).extend(keepers)
        if self._budget.limit_bytes is not None:
            tensor = value_of(value.producer, value.index)
            for target, keepers in kept.items():
                if keepers:
                    count = value.count * local_bytes(tensor, target, self._choices.parts)
                    self._memory.append((self._any(list(dict.fromkeys(keepers))), count))

    def _any(self, pairs: list[int]) -> int:
        """A variable that is 1 where any of ``pairs`` is."""
        if len(pairs) == 1:
            return pairs[0]
        shared = self._program.add(0.0)
        for pair in pairs:
            self._program.at_most([(pair, 1.0), (shared, -1.0)], 0.0)
        return shared

    def _pair(self, value: _Value, reader: Node, slot: int) -> dict[tuple[Places, Reading], int]:
        """A variable for each placement and way to be read; the two marginals are the two ops'
        choices."""
        key = (value.producer, value.index, reader, slot)
        if key in self._pairs:
            return self._pairs[key]
        left: dict[Places, list[tuple[int, float]]] = {}
        right: dict[Reading, list[tuple[int, float]]] = {}
        for v, s in self._taking(value.producer):
            left.setdefault(s.outputs[value.index], []).append((v, -1.0))
        for v, s in self._taking(reader):
            right.setdefault((s.inputs[slot], s.grads[slot]), []).append((v, -1.0))
        as_kept = value.producer in self._limits.used_as_kept
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

    def _move_seconds(self, value: _Value, source: Places, target: Places, grad: Places) -> float:
        tensor = value_of(value.producer, value.index)
        there, back = move_steps(self._choices, value.producer, tensor, source, (target, grad))
        return steps_seconds(there, tensor, self._rates) + steps_seconds(back, tensor, self._rates)

    def _limit_memory(self) -> None:
        assert self._budget.limit_bytes is not None
        passing = [
            (v, float(passing_bytes(s)))
            for node in self._options
            for v, s in self._taking(node)
            if passing_bytes(s)
        ]
        if passing:
            most = self._program.add(0.0, upper=max(count for _, count in passing) / 2**20)
            for v, count in passing:
                self._program.at_most([(v, count / 2**20), (most, -1.0)], 0.0)
            self._memory.append((most, 2.0**20))
        terms = [(v, count / 2**20) for v, count in self._memory]
        self._program.at_most(terms, self._budget.limit_bytes / 2**20)

    def _why_none(self) -> str:
        """The error where nothing fits: how much the smallest plan needs."""
        limit = self._budget.limit_bytes
        least = None if limit is None else self._least_bytes()
        if limit is None or least is None:
            return "no plan satisfies all that the policy forces at once"
        return (
            f"no plan fits into {limit / 2**30:.2f} GiB a rank (pas_config['memory_bytes']); the "
            f"smallest is estimated to need {least / 2**30:.2f} GiB. More ranks, a shorter "
            "sequence, or a smaller pas_config['optimizer_bytes_per_parameter'] help"
        )

    def _least_bytes(self) -> float | None:
        """Of all plans; None if there is none at all."""
        budget = Budget(float(2**60), self._budget.optimizer_bytes)
        free = _Problem(self._choices, self._limits, self._rates, budget, set())
        program = free._program
        program.cost = [0.0] * len(program.cost)
        for v, count in free._memory:
            program.cost[v] += count / 2**40
        try:
            solution = program.solve()
        except Infeasible:
            return None
        return sum(solution[v] * count for v, count in free._memory)
