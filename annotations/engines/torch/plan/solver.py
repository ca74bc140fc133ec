"""Linear programs, solved by HiGHS: minimise cost . x, some x 0 or 1, under linear constraints."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

SOLVER_SECONDS = 60

Terms = Sequence[tuple[int, float]]

OUT_OF_TIME, INFEASIBLE = 1, 2  # scipy's numbers for them


class PlanningError(ValueError):
    """No plan satisfies all constraints, or none was found in time."""


class Infeasible(PlanningError):
    """No solution satisfies all constraints."""


class LinearProgram:
    """Collects variables and constraints, then solves."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self._variables: list[tuple[bool, float]] = []  # whether binary, upper bound
        self._rows: list[tuple[Terms, float, float]] = []

    def add(self, seconds: float, *, binary: bool = False, upper: float = 1.0) -> int:
        """A variable from 0 to ``upper``; its number."""
        self.cost.append(seconds)
        self._variables.append((binary, upper))
        return len(self.cost) - 1

    def equal(self, terms: Terms, right: float) -> None:
        """sum of terms = right"""
        self._rows.append((terms, right, right))

    def at_most(self, terms: Terms, right: float) -> None:
        """sum of terms <= right"""
        self._rows.append((terms, -np.inf, right))

    def solve(self) -> npt.NDArray[np.float64]:
        """The variables, within 1e-6 of the least cost, or the best found in SOLVER_SECONDS, with a
        warning. Raises Infeasible where there is no solution, PlanningError where none was found
        in time."""
        terms, low, high = zip(*self._rows, strict=True)
        binary, upper = zip(*self._variables, strict=True)
        rows = np.repeat(np.arange(len(terms)), [len(each) for each in terms])
        columns, values = zip(*itertools.chain.from_iterable(terms), strict=True)
        matrix = coo_array((values, (rows, columns)), shape=(len(terms), len(self.cost))).tocsc()
        # In microseconds the solver's tolerances are far below any cost that matters.
        result = milp(
            np.array(self.cost) * 1e6,
            constraints=LinearConstraint(matrix, low, high),
            integrality=np.array(binary, dtype=int),
            bounds=Bounds(0, np.array(upper)),
            options={"time_limit": SOLVER_SECONDS, "mip_rel_gap": 1e-6},
        )
        if result.status == INFEASIBLE:
            raise Infeasible(f"no plan: {result.message}")
        if result.x is None and result.status == OUT_OF_TIME:
            raise PlanningError(
                f"no plan was found in {SOLVER_SECONDS} s, though there may be one: leave more "
                "memory (pas_config['memory_bytes']), or give a mapping for policy"
            )
        if result.x is None:
            raise PlanningError(f"no plan: {result.message}")
        if result.status == OUT_OF_TIME:
            warnings.warn(
                f"the planner stopped after {SOLVER_SECONDS} s: its plan is the best found, and "
                f"may be {result.mip_gap:.1%} slower than the best there is",
                stacklevel=2,
            )
        return result.x
