"""What a plan of this package predicts, beside what was measured: times, bytes, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch

from benchmark.cases import Case
from benchmark.measure.timing import Marks
from benchmark.ops import Op, plan_of
from benchmark.ranks import Ranks
from benchmark.show.text import above, markdown, mebibytes, number
from customized_ops.ring_attention import Layout
from customized_ops.ring_attention.core.comm import Comm
from customized_ops.ring_attention.core.comm.comm_groups import comm_by_name, group_name
from customized_ops.ring_attention.core.cost import CostModel
from customized_ops.ring_attention.core.plan.report.figures import measures


class Watch(Marks):
    """Marks that also record the bytes received so far and the arena's use."""

    def __init__(self, cuda: bool, comm: Comm) -> None:
        super().__init__(cuda)
        self._comm = comm
        self.received: list[int] = []
        self.arena: list[int] = []

    def __call__(self) -> None:
        """See :class:`~.timing.Marks`."""
        super().__call__()
        self.received.append(self._comm.counters.received_bytes)
        self.arena.append(self._comm.arena_bytes)


@dataclass
class Account:
    """The account of a contestant of this package in a case. Times are in ms; bytes are those of
    the rank that has most.

    Attributes:
        forward, backward: predicted times. received: bytes in the forward and in the backward, as
            planned. counted: the same, as the group counted them in a run.
        least: the fewest forward bytes that the busiest rank of any plan can receive.
        received_all, least_all: the same for all ranks together.
        pairs, least_pairs: of the rank with the most, and the fewest that any plan can give it.
        imbalance: pairs times heads of the largest rank over the mean.
        plan_ms: time to make the plan of a length not seen before, and a rank's part of it.
        arena_bytes: symmetric memory that a pass uses, which torch's allocator does not count.
        alone_bytes: peak of the op on one device for as many tokens as a rank holds, beyond its
            inputs. shard_bytes: keys and values of as many tokens. input_bytes: q, k, v and the
            gradient of out.
    """

    forward: float
    backward: float
    received: list[int]
    least: int
    received_all: int
    least_all: int
    pairs: int
    least_pairs: int
    imbalance: float
    counted: list[int] | None = None
    plan_ms: float | None = None
    arena_bytes: int = 0
    alone_bytes: int | None = None
    shard_bytes: int = 0
    input_bytes: int = 0

    @classmethod
    def of(
        cls,
        case: Case,
        layout: Layout,
        costs: CostModel,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype | None = None,
    ) -> Account:
        """The account with what the plan predicts.

        Args:
            dtype: of the inputs. reduce_dtype: dtype in which gradients travel, as given to the op.
        """
        (h, g), d, size = case.heads, case.head_dim, dtype.itemsize
        reduce_size = reduce_dtype.itemsize if reduce_dtype else None
        ranks = layout.group_size
        plan = plan_of(case, layout, costs)
        found = measures(plan, h, g, d, d, size, costs, reduce_size)
        there = plan.forward_bytes(h, g, d, d, size)
        back = plan.backward_bytes(h, g, d, d, size, reduce_size)
        return cls(
            forward=1e3 * found.forward.seconds,
            backward=1e3 * found.backward.seconds,
            received=[int(each[:, 1].max()) for each in (there, back)],
            least=found.bounds.busiest,
            received_all=int(found.received_bytes.sum()),
            least_all=found.bounds.total,
            pairs=int(found.pairs.max()),
            least_pairs=found.bounds.pairs,
            imbalance=found.imbalance,
            shard_bytes=2 * g * d * size * (case.tokens // ranks),
            input_bytes=2 * (h + g) * d * size * (case.tokens // ranks),
        )

    def saw(self, watch: Watch, ranks: Ranks) -> None:
        """Record what was counted in a run."""
        passes = [b - a for a, b in pairwise(watch.received)]
        told = ranks.gather([*passes, *watch.arena[1:]])
        *self.counted, there, back = (max(each) for each in zip(*told, strict=True))
        self.arena_bytes = max(there, back)

    def time_plan(self, op: Op, other: Case, layout: Any, ranks: Ranks) -> None:
        """Measure how long it takes to make the plan of another length and a rank's part of it."""
        costs = comm_of(op).costs
        began = perf_counter()
        plan_of(other, layout, costs).rank(ranks.rank)
        self.plan_ms = max(ranks.gather(1e3 * (perf_counter() - began)))

    def memory(self, peak_bytes: int | None) -> float | None:
        """A rank's inputs, its peak beyond them and its arena, over the sum of what the same op
        takes alone on as many tokens, its inputs, and one remote shard of keys and values."""
        if not peak_bytes or not self.alone_bytes:
            return None
        least = self.input_bytes + self.alone_bytes + self.shard_bytes
        return (self.input_bytes + peak_bytes + self.arena_bytes) / least


def comm_of(op: Op) -> Comm:
    """The Comm through which an op's ranks send."""
    return comm_by_name(group_name(op.rest["process_group"]))


HEAD = (
    *("plan of", "predicted fwd ms", "off", "bwd ms", "off", "received fwd MiB", "above least"),
    *("all ranks'", "bwd MiB", "pairs above least", "imbalance", "plan ms", "arena MiB"),
    "memory x (alone + shard)",
)


def error(predicted: float, measured: float | None) -> str:
    """The error of a prediction, as text."""
    return "" if not measured else f"{100 * (predicted / measured - 1):+.0f}%"


def cells(row: Any) -> list[str]:
    """The cells of a row that has an account, in the table below the contestants' table."""
    said: Account = row.account
    found = said.counted or said.received
    there, back = (
        mebibytes(planned) + (f" (counted {mebibytes(counted)})" if planned != counted else "")
        for planned, counted in zip(said.received, found, strict=True)
    )
    return [
        *(row.contestant, number(said.forward, 4), error(said.forward, row.forward)),
        *(number(said.backward, 4), error(said.backward, row.backward)),
        *(there, above(said.received[0], said.least), above(said.received_all, said.least_all)),
        *(back, above(said.pairs, said.least_pairs), f"{said.imbalance:.3f}"),
        *(number(said.plan_ms), mebibytes(said.arena_bytes), number(said.memory(row.peak_bytes))),
    ]


def table(rows: Sequence[Any]) -> str:
    """The table of the rows that have an account; empty if none has."""
    own = [row for row in rows if row.account is not None]
    return markdown(HEAD, [cells(row) for row in own], 1) if own else ""
