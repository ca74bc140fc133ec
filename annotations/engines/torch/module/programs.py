"""The planned graphs of a module: of its modes, and of the shapes that its inputs have."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from ..plan.engine_plan import EnginePlan
from ..run.execute import Program
from ..run.lowered import Lowered

Modes = tuple[bool, ...]  # of each module in order: whether it trains

# Graphs of one mode that are kept, and from how many on a user is told that there are many.
MOST, MANY = 16, 4


class Programs:
    """Planned graphs by mode, the one that was used last at the end.

    Attributes:
        plans: the plan of each graph.
    """

    def __init__(self) -> None:
        self.plans: dict[Program | Lowered, EnginePlan] = {}
        self._of: dict[Modes, OrderedDict[Program | Lowered, None]] = {}
        self._warned = False

    def latest(self, modes: Modes) -> Program | Lowered | None:
        """The graph that was used last; None where there is none."""
        known = self._of.get(modes)
        return next(reversed(known)) if known else None

    def find(self, modes: Modes, flat: Sequence[Any]) -> tuple[Program | Lowered, list[Any]] | None:
        """A graph that takes these flat inputs, and them as it takes them."""
        known = self._of[modes]
        for program in reversed(known):
            fitted = program.captured.inputs.fitted(flat)
            if fitted is not None:
                known.move_to_end(program)
                return program, fitted
        return None

    def add(self, modes: Modes, program: Program | Lowered, plan: EnginePlan) -> None:
        """Keep a graph; drops the one that was not used for the longest, if there are too many."""
        known = self._of.setdefault(modes, OrderedDict())
        known[program] = None
        self.plans[program] = plan
        if len(known) > MOST:
            dropped, _ = known.popitem(last=False)
            del self.plans[dropped]
        if len(known) >= MANY and not self._warned:
            self._warned = True
            warnings.warn(
                f"a parallelized module has met inputs of {len(known)} shapes, and captures and "
                f"plans each anew; the last {MOST} are kept. Fill batches up to a few totals",
                stacklevel=6,
            )
