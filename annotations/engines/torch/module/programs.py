"""The planned graphs of a module: which one takes a batch, and from which another can be made."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..capture.call_inputs import Dims
from ..capture.capture import Captured
from ..plan.engine_plan import EnginePlan
from ..plan.planning import Planned
from ..run.execute import Program
from ..run.lowered import Lowered

Modes = tuple[bool, ...]  # for each module, in order: whether it is in training mode

# How many graphs are kept for the same modes, and how many of fixed sizes there are when a warning
# is given.
MOST, MANY = 16, 4


@dataclass(frozen=True, eq=False)
class Base:
    """A graph as it was captured, with all sizes fixed, and its plan. From these, graphs with open
    sizes and the same plan may be made."""

    captured: Captured
    planned: Planned


class Programs:
    """Planned graphs by the modes of a module, the most recently used last; and each one's plan."""

    def __init__(self) -> None:
        self.plans: dict[Program | Lowered, EnginePlan] = {}
        self.why_fixed = ""  # the latest reason for which sizes were not left open
        self._fixed: set[Dims] = set()
        self._of: dict[Modes, OrderedDict[Program | Lowered, Base | None]] = {}
        self._opened: set[Any] = set()
        self._warned = False

    def latest(self, modes: Modes) -> Program | Lowered | None:
        """The graph that was used last."""
        known = self._of.get(modes)
        return next(reversed(known)) if known else None

    def find(self, modes: Modes, flat: Sequence[Any]) -> tuple[Program | Lowered, list[Any]] | None:
        """A graph that takes these flat inputs, and the inputs in the form that it takes."""
        known = self._of[modes]
        for program in reversed(known):
            fitted = program.captured.inputs.fitted(flat)
            if fitted is None or (isinstance(program, Lowered) and not program.takes(fitted)):
                continue
            known.move_to_end(program)
            return program, fitted
        return None

    def to_open(self, modes: Modes, flat: Sequence[Any], ranks: int) -> Base | None:
        """What a graph with open sizes may be made from for these inputs; each is given once."""
        for base in reversed(self._of[modes].values()):
            if base is None:
                continue
            inputs = base.captured.inputs
            dims, lengths = inputs.differing(flat), inputs.room_for(flat)
            key = base, dims, lengths
            new = dims not in self._fixed and key not in self._opened
            if dims and new and inputs.may_open(flat, ranks):
                self._opened.add(key)
                return base
        return None

    def fix(self, dims: Dims, why: str) -> None:
        """Never leave these sizes open again."""
        self._fixed.add(dims)
        self.why_fixed = why

    def add(
        self,
        modes: Modes,
        program: Program | Lowered,
        plan: EnginePlan,
        base: Base | None = None,
    ) -> None:
        """Keep a graph; if there are too many, drop the least recently used one."""
        known = self._of.setdefault(modes, OrderedDict())
        known[program] = base
        self.plans[program] = plan
        if len(known) > MOST:
            self.drop(modes, next(iter(known)))
        fixed = sum(each is not None for each in known.values())
        if fixed >= MANY and not self._warned:
            self._warned = True
            why = f" ({self.why_fixed})" if self.why_fixed else ""
            warnings.warn(
                f"a parallelized module has met inputs of {fixed} shapes, and captures and "
                f"plans each anew{why}; the last {MOST} are kept. Fill batches up to a few totals, "
                "and let the example have the most documents",
                stacklevel=6,
            )

    def drop(self, modes: Modes, program: Program | Lowered) -> None:
        """Forget a graph."""
        base = self._of[modes].pop(program)
        self._opened -= {key for key in self._opened if key[0] is base}
        del self.plans[program]
