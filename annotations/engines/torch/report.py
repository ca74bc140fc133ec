"""A plan as a table: which op is split on what, what moves, how many bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.fx import Node

from annotations.registry import record_of

from .cost import move_bytes
from .planner import Choices
from .policies import OpSite
from .strategies import Strategy


@dataclass(frozen=True)
class Row:
    """One line of a plan; bytes are per call and rank, for the rank that receives most."""

    op: str
    split: str
    moves: str
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True)
class EnginePlan:
    """What the engine decided for a module.

    Attributes:
        parts: ranks the module is cut over. copies: data-parallel copies of it.
        splits: identifier of each annotated op by its name in the graph, None if it runs whole.
        rows: with how often each occurs; the gradient sync is the last.
    """

    parts: int
    copies: int
    splits: Mapping[str, str | None]
    rows: Sequence[tuple[Row, int]]

    def __str__(self) -> str:
        header = ("op", "count", "split", "what moves", "forward", "backward")
        lines = [
            (r.op, str(n), r.split, r.moves, _bytes(r.forward_bytes), _bytes(r.backward_bytes))
            for r, n in self.rows
        ]
        widths = [max(len(line[c]) for line in [header, *lines]) for c in range(len(header))]
        total = [
            sum(getattr(r, side) * n for r, n in self.rows)
            for side in ("forward_bytes", "backward_bytes")
        ]
        title = f"plan: {self.parts} ranks a copy, copies of the model: {self.copies}"
        rule = "-" * (sum(widths) + 2 * len(widths) - 2)
        body = ["  ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)).rstrip()
                for line in [header, *lines]]  # fmt: skip
        return "\n".join(
            [title, body[0], rule, *body[1:], rule,
             f"received by the busiest rank a step: {_bytes(total[0])} forward, "
             f"{_bytes(total[1])} backward"]
        )  # fmt: skip


def make_report(
    choices: Choices,
    chosen: Mapping[Node, Strategy],
    parts: int,
    copies: int,
    gradient_bytes: int,
) -> EnginePlan:
    """Summarise a plan; equal ops and equal moves share a row."""
    rows: Counter[Row] = Counter()
    by_name = {op.name: op for op in choices.ops}
    for node, strategy in chosen.items():
        if node.name in by_name:
            rows[_op_row(by_name[node.name], strategy, parts)] += 1
    moved = set()
    for edge in choices.edges:
        source = chosen[edge.producer].outputs[edge.index]
        target = chosen[edge.consumer].inputs[edge.slot]
        key = (edge.producer, edge.index, target)
        if source == target or key in moved:
            continue
        moved.add(key)
        value = edge.producer.meta["val"]
        value = value[edge.index] if isinstance(value, tuple | list) else value
        forward, backward = move_bytes(value, source, target, parts)
        if forward or backward:
            what = f"{_place(source)} -> {_place(target)} of {list(value.shape)}"
            record = record_of(edge.producer.target)
            name = edge.producer.name if record is None else record.title
            rows[Row(name, "-", what, forward, backward)] += 1
    rows[_sync_row(parts * copies, gradient_bytes)] += 1
    splits = {op.name: chosen[node].identifier for node in chosen
              if (op := by_name.get(node.name)) is not None}  # fmt: skip
    return EnginePlan(parts, copies, splits, list(rows.items()))


def whole_copies(copies: int, gradient_bytes: int) -> EnginePlan:
    """The plan of a module that is copied but not cut."""
    return EnginePlan(1, copies, {}, [(_sync_row(copies, gradient_bytes), 1)])


def _sync_row(ranks: int, gradient_bytes: int) -> Row:
    synced = 2 * gradient_bytes * (ranks - 1) // ranks
    return Row("sync_grad", "-", f"all-reduce of gradients, {ranks} ranks", 0, synced)


def _op_row(op: OpSite, strategy: Strategy, parts: int) -> Row:
    split = "whole" if strategy.identifier is None else f"{strategy.identifier} / {parts}"
    inner = strategy.inner
    what = inner.what or "nothing"
    if inner.imbalance >= 1.005:
        what += f" (imbalance {inner.imbalance:.2f})"
    return Row(op.op, split, what, inner.forward_bytes, inner.backward_bytes)


def _place(place: Placement) -> str:
    if isinstance(place, Shard):
        return f"cut on dim {place.dim}"
    return {Replicate: "whole", Partial: "partial sum"}.get(type(place), str(place))


def _bytes(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024  # type: ignore[assignment]
    return f"{count:.1f} GiB"
