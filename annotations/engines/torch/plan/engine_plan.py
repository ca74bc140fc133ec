"""A plan as a value: it prints as a table, and can be written to a file and read back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from torch.distributed.tensor import Partial, Shard

from ..strategies.op_strategies import Strategy
from ..strategies.placements import Placements

Split = str | None | tuple[str | None, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One line of a plan: the op that runs, or whose result moves; what it is cut on; and what
    moves, between which placements. Bytes are per call and rank, for the rank that receives most.
    Seconds are predicted, for forward and backward."""

    op: str
    split: str
    moves: str
    forward_bytes: int
    backward_bytes: int
    seconds: float = 0.0


@dataclass(frozen=True)
class OpPlacements:
    """How one op of a plan runs: for each mesh axis, what an annotated op is split on; and the
    placements of its tensors, as ``"S1,R"``, with an entry for each axis: ``R`` for whole, ``S1``
    for cut on dim 1, ``P`` for a partial sum."""

    split: tuple[str | None, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @classmethod
    def of(cls, strategy: Strategy) -> OpPlacements:
        """The split and placements of a strategy."""
        tensors = strategy.inputs, strategy.outputs
        return cls(strategy.split, *(tuple(map(placements_text, each)) for each in tensors))


@dataclass(frozen=True)
class Held:
    """Bytes that a rank holds; ``casts`` are parameters cast to the dtype that is computed in."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    passing: int
    casts: int = 0

    @property
    def total(self) -> int:
        """All together."""
        return sum(asdict(self).values())


@dataclass(frozen=True)
class EnginePlan:
    """What the engine decided for a module.

    Attributes:
        parts, mesh_shape: ranks the module is cut over. copies: data-parallel copies of it.
        splits: the identifier that each annotated op, by its name in the graph, is split on, None
            if it runs whole; on a mesh of several axes a tuple of them.
        rows: each with how often it occurs; the gradient sync is the last.
        ops: how each op of the graph runs, by its name.
        parameters: placements of sharded parameters, by their names in the module.
        held: estimate of a rank's memory. limit_bytes: what it may hold, None for no limit.
        calibrated: whether the rates were measured on this machine.
        graph: hash of the graph that the plan is for.
        hoisted: whether the plan puts a sequence in another order.
        in_order: by the length of a sequence, the ops that run on it in another order.
        notes: lines below the title, on what was done to the module before.
    """

    parts: int
    copies: int
    splits: Mapping[str, Split]
    rows: Sequence[tuple[Row, int]]
    mesh_shape: tuple[int, ...] = ()
    ops: Mapping[str, OpPlacements] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    held: Held | None = None
    limit_bytes: float | None = None
    calibrated: bool = False
    graph: str = ""
    notes: Sequence[str] = ()
    hoisted: bool = False
    in_order: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Predicted time of a step, without the optimizer."""
        return sum(row.seconds * n for row, n in self.rows)

    @property
    def packed_layout(self) -> str:
        """The ``layout`` to give to ``packed_batches(..., whole=True)``, so that attention over
        packed documents that is cut on the sequence finds what was planned ahead: "balanced" if
        the graph puts each batch's tokens in an order of its own, "contiguous" if it keeps natural
        order."""
        return "balanced" if self.hoisted else "contiguous"

    def __str__(self) -> str:
        lines = [("op", "count", "split", "what moves", "forward", "backward", "us")]
        lines += [
            (r.op, str(n), r.split, r.moves, bytes_text(r.forward_bytes),
             bytes_text(r.backward_bytes), f"{r.seconds * 1e6:.0f}")
            for r, n in self.rows
        ]  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        head, *body = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        rule = "-" * (sum(widths) + 2 * len(widths) - 2)
        shape = " x ".join(map(str, self.mesh_shape))
        mesh = f" ({shape})" if len(self.mesh_shape) > 1 else ""
        title = f"plan: {self.parts} ranks{mesh} a copy, copies of the model: {self.copies}"
        text = [title, *self.notes, head, rule, *body, rule, *self._totals()]
        if any("->" in row.split for row, _ in self.rows):
            text.append("S1: cut on dim 1, R: whole, P: a partial sum; one for each axis")
        if self.parts > 1 and not any(set("/SP") & set(row.split) for row, _ in self.rows):
            text.append(
                "nothing is cut, so each rank computes all: cutting was predicted to take longer, "
                "or the policy cuts none of these"
            )
        return "\n".join(text)

    def _totals(self) -> list[str]:
        forward = bytes_text(sum(row.forward_bytes * n for row, n in self.rows))
        backward = bytes_text(sum(row.backward_bytes * n for row, n in self.rows))
        found = [f"received by the busiest rank a step: {forward} forward, {backward} backward"]
        if self.held is None:
            return found
        rates = "measured rates" if self.calibrated else "uncalibrated: rates are round numbers"
        limit = "no limit" if self.limit_bytes is None else f"of {bytes_text(self.limit_bytes)}"
        held = {name: bytes_text(count) for name, count in asdict(self.held).items()}
        casts = f"casts of parameters {held['casts']}, " if self.held.casts else ""
        return [
            *found,
            f"predicted: {self.seconds * 1e3:.3f} ms a step ({rates})",
            f"memory a rank, estimated: {bytes_text(self.held.total)} ({limit}): parameters "
            f"{held['parameters']}, gradients {held['gradients']}, optimizer {held['optimizer']}, "
            f"{casts}activations {held['activations']}, received in an op {held['passing']}",
        ]

    def to_json(self) -> str:
        """The plan as text. ``ops``, ``splits`` and ``parameters`` may be edited: the planner
        decides ops that are left out, and parameters that are left out are whole."""
        given = {**asdict(self), "predicted_seconds": self.seconds}
        given["rows"] = [{**asdict(row), "count": n} for row, n in self.rows]
        return json.dumps(given, indent=1)

    @classmethod
    def from_json(cls, text: str) -> EnginePlan:
        """A plan from what :meth:`to_json` made, edited or not. Raises ValueError on other text."""
        try:
            given = json.loads(text)
            given.pop("predicted_seconds", None)
            counts = [(row.pop("count"), row) for row in given["rows"]]
            given["rows"] = [(Row(**row), count) for count, row in counts]
            for name, split in given["splits"].items():
                given["splits"][name] = tuple(split) if isinstance(split, list) else split
            for name, op in given["ops"].items():
                given["ops"][name] = OpPlacements(*map(tuple, op.values()))
            given["held"] = Held(**given["held"]) if given["held"] else None
            given |= {name: tuple(given[name]) for name in ("mesh_shape", "notes")}
            return cls(**given)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"not a plan of the embedded engine: {error}") from None


def placements_text(placements: Placements) -> str:
    """``S1,R`` for cut on dim 1 along the first axis, whole along the second."""
    return ",".join(
        f"S{p.dim}" if isinstance(p, Shard) else "P" if isinstance(p, Partial) else "R"
        for p in placements
    )


def bytes_text(count: float) -> str:
    """A number of bytes, in the largest unit that leaves a number of at least 1."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def whole_copies(copies: int, gradient_bytes: int) -> EnginePlan:
    """The plan of a module that is copied but not cut."""
    synced = 2 * gradient_bytes * (copies - 1) // copies
    return EnginePlan(1, copies, {}, [(sync_row(copies, synced, 0.0), 1)], (1,))


def sync_row(ranks: int, count: int, seconds: float) -> Row:
    """The row of the gradients' all-reduce."""
    return Row("sync_grad", "-", f"all-reduce of gradients, {ranks} ranks", 0, count, seconds)


def to_plain(value: Any) -> Any:
    """The value as it is, or its only element if there is one axis."""
    return value[0] if len(value) == 1 else value


def each_axis(split: T | tuple[T, ...]) -> tuple[T, ...]:
    """What an op is split on, or forced to, for each axis of the mesh."""
    return split if isinstance(split, tuple) else (split,)
