"""Choosing a strategy for every op: an integer linear program, solved by HiGHS.

Each op takes exactly one strategy; each edge pays for moving a tensor from how its producer leaves
it to how its consumer wants it, forward and backward. Splits that a policy forces are constraints.
Parameters stay whole on every rank: their gradients are added up once, in ``sync_grad``.

The edge variables make the program nearly integral by itself, as in Alpa (Zheng et al.,
arXiv:2201.12023, 2022, section 4.2), so that it solves in well under a second a layer.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.fx import Node

from .capture import Captured, tensor_inputs
from .cost import Rates, compute_seconds, move_seconds
from .policies import OpSite, sites
from .strategies import Strategy, is_getitem, strategies_of

SOLVER_SECONDS = 60


class PlanningError(RuntimeError):
    """The solver found no plan; a bug here, since running everything whole is always one."""


@dataclass(frozen=True)
class Edge:
    """``consumer`` reads result ``index`` of ``producer`` as its input ``slot``."""

    producer: Node
    index: int
    consumer: Node
    slot: int


@dataclass(frozen=True, eq=False)
class Choices:
    """All strategies of a graph's ops, before one is chosen.

    Attributes:
        strategies: for each op, the first being to run it whole.
        edges: every tensor that one op hands to another.
        ops: the annotated ops, as policies see them.
    """

    strategies: Mapping[Node, list[Strategy]]
    edges: Sequence[Edge]
    ops: Sequence[OpSite]


def find_choices(captured: Captured, mesh: DeviceMesh) -> Choices:
    """Collect the strategies of every op over ``mesh``."""
    known: dict[object, list[Strategy]] = {}
    strategies: dict[Node, list[Strategy]] = {}
    edges = []
    for node in captured.graph.nodes:
        if is_getitem(node):
            continue
        strategies[node] = strategies_of(node, mesh, known)
        for slot, source in enumerate(tensor_inputs(node)):
            producer, index = resolve(source)
            edges.append(Edge(producer, index, node, slot))
    return Choices(strategies, edges, sites(captured.graph, strategies))


def resolve(node: Node) -> tuple[Node, int]:
    """The op that made a value and which of its results it is."""
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, Node) and isinstance(index, int)
        return source, index
    return node, 0


def choose(
    choices: Choices, forced: Mapping[str, str | None], parts: int, rates: Rates
) -> dict[Node, Strategy]:
    """The cheapest strategies that respect ``forced`` (op name to identifier, None is whole)."""
    program = _Program()
    variables: dict[Node, list[int]] = {}
    for node, options in choices.strategies.items():
        costs = [compute_seconds(node, s, parts, rates) for s in options]
        variables[node] = [program.add(cost, binary=True) for cost in costs]
        allowed = [
            v
            for v, s in zip(variables[node], options, strict=True)
            if node.name not in forced or s.identifier == forced[node.name]
        ]
        assert allowed, "policies.apply has checked that the split exists"
        program.equal([(v, 1.0) for v in allowed], 1.0)
        program.equal([(v, 1.0) for v in variables[node]], 1.0)
    for edge in choices.edges:
        _add_edge(program, edge, choices, variables, parts, rates)
    solution = program.solve()
    return {
        node: options[int(np.argmax([solution[v] for v in variables[node]]))]
        for node, options in choices.strategies.items()
    }


def _add_edge(
    program: _Program,
    edge: Edge,
    choices: Choices,
    variables: Mapping[Node, list[int]],
    parts: int,
    rates: Rates,
) -> None:
    """One variable a pair of placements; its two marginals are the two ops' choices."""
    left: dict[Placement, list[int]] = {}
    right: dict[Placement, list[int]] = {}
    for v, s in zip(variables[edge.producer], choices.strategies[edge.producer], strict=True):
        left.setdefault(s.outputs[edge.index], []).append(v)
    for v, s in zip(variables[edge.consumer], choices.strategies[edge.consumer], strict=True):
        right.setdefault(s.inputs[edge.slot], []).append(v)
    value = edge.producer.meta["val"]
    value = value[edge.index] if isinstance(value, tuple | list) else value
    pairs = {
        (p, q): program.add(move_seconds(value, p, q, parts, rates), binary=False)
        for p in left
        for q in right
    }
    for p, chosen in left.items():
        terms = [(pairs[p, q], 1.0) for q in right] + [(v, -1.0) for v in chosen]
        program.equal(terms, 0.0)
    for q, chosen in right.items():
        terms = [(pairs[p, q], 1.0) for p in left] + [(v, -1.0) for v in chosen]
        program.equal(terms, 0.0)


class _Program:
    """minimise cost . x subject to equalities, 0 <= x <= 1, some x integral."""

    def __init__(self) -> None:
        self._cost: list[float] = []
        self._binary: list[int] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._values: list[float] = []
        self._right: list[float] = []

    def add(self, cost: float, *, binary: bool) -> int:
        self._cost.append(cost)
        self._binary.append(int(binary))
        return len(self._cost) - 1

    def equal(self, terms: Sequence[tuple[int, float]], right: float) -> None:
        for column, value in terms:
            self._rows.append(len(self._right))
            self._columns.append(column)
            self._values.append(value)
        self._right.append(right)

    def solve(self) -> np.ndarray:
        shape = (len(self._right), len(self._cost))
        matrix = coo_array((self._values, (self._rows, self._columns)), shape=shape).tocsc()
        # Costs are microseconds to seconds; scaled so that the solver's tolerances are far below.
        cost = np.array(self._cost) / max(max(self._cost, default=0.0), 1e-12)
        result = milp(
            cost,
            constraints=LinearConstraint(matrix, self._right, self._right),
            integrality=np.array(self._binary),
            bounds=Bounds(0, 1),
            options={"time_limit": SOLVER_SECONDS},
        )
        if result.x is None:
            raise PlanningError(f"no plan: {result.message}")
        return result.x
