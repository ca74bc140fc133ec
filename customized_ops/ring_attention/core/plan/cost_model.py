"""Predicted times of plans, to choose between them.

A rank's time is its pairs at the kernel's rate and its bytes at the link's. Only the order of plans
matters here, so the constants need to be right within a factor of two or so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Floats, Ints
from ..topology import Topology
from .heads import Sizes, TokenBytes
from .plan_value import PlanValue

Seconds = Floats


@dataclass(frozen=True)
class Pass:
    """Predicted times of the forward or of the backward pass.

    Attributes:
        compute, link: float64[P]: each rank's time in kernels and on its links.
        merge: float64[P]: approximate time of each rank to merge results, where keys arrive in many
            steps, and over several hosts to copy what arrived to its place.
        launch: float64[P]: time that each rank's host takes to start kernels, alongside these.
        overlap: whether keys arrive while others are attended.
        alone: float64[P]: time on the links that kernels do not hide: over several hosts, that of
            rows, which arrive before they are attended and go home afterwards.
        parts: number of parts in which keys arrive, over several hosts.
    """

    compute: Seconds
    link: Seconds
    merge: Seconds
    launch: Seconds
    overlap: bool
    alone: Seconds
    parts: float = math.inf

    @cached_property
    def host_bound(self) -> bool:
        """Whether starting kernels takes longer than running them, on the slowest rank."""
        return self.attend_seconds > float((self.compute + self.merge).max())

    @cached_property
    def attend_seconds(self) -> float:
        """Time of the slowest rank in kernels and merges, or in starting them."""
        return float(np.maximum(self.compute + self.merge, self.launch).max())

    @cached_property
    def seconds(self) -> float:
        """Time of the pass: the slowest rank's kernels and the busiest link, each of which waits
        for the first part of the other, or the hosts; and what nothing hides."""
        link, alone = float(self.link.max()), float(self.alone.max())
        kernels, launch = float((self.compute + self.merge).max()), float(self.launch.max())
        if self.overlap:
            both = max(kernels, link) + min(kernels, link) / self.parts
        elif math.isinf(self.parts):  # on one host as if kernels were started when keys are there
            both = max(kernels, launch) + link
        else:
            both = kernels + link
        return max(both, launch) + alone


@dataclass(frozen=True)
class CostModel:
    """Rates of one device and its links.

    The defaults were measured on two H200s over NVLink in bf16 with 32 query and 8 key heads of 128
    (flash-attn-4, causal, 32k tokens; pushes by the copy engine over symmetric memory, which take
    49, 177 and 690 us for 16, 64 and 256 MiB, and 12 us until the first byte can be used).

    Attributes:
        forward_flops, backward_flops: floating-point operations a second of the kernel; backward
            does 2.5 times as many.
        link_bytes: bytes a second that a rank sends, and as many that it receives meanwhile.
        step_seconds: time before the first byte of an exchange arrives.
        call_seconds: time of the host for one kernel call and for what is sent and merged because
            of it, hidden behind longer kernels; 0 where calls are replayed from a CUDA graph.
        batch_seconds, message_seconds: further time of the host for each batch of messages, to
            pack, send, receive and place them, and for each message that a rank sends or receives
            in it; 0 where ranks write into one another's memory, as call_seconds has that.
        topology: hosts of the ranks; None: one host, or links that are all alike. The rates above
            hold inside a host.
        between_bytes, between_seconds: like link_bytes and step_seconds, but between hosts (by
            default 400 Gbit/s a rank).
        one_sided: whether ranks of a host write into one another's memory, so that all exchanges of
            a pass may be on their way at once; else ranks exchange messages, one after the other.
            Between hosts they always exchange messages.
        memory_bytes: bytes a second at which a device reads and writes its own memory, as when it
            merges results; not measured, but about what is left in practice of an H200's 4.8e12.
        held_shards: how many keys of others a rank may hold at once, in units of the largest rank's
            shard; with few tokens it may be more, up to HELD_BYTES.
        gathered_bytes: bytes of others' keys above which HELD_SHARDS bounds what a rank holds,
            though held_shards does not; then keys come by messages. For a group of GPUs that send
            messages anyway this is an eighth of its smallest GPU's memory.
        link_alone, between_alone: how many times as many bytes a link carries one way while none go
            the other, inside hosts and between them: 1 where the two ways are independent, as over
            NVLink, up to 2 where they share the link, as over NCCL's sockets. Simulations of
            messages count with it. Plans are chosen as if it were 1.
    """

    forward_flops: float = 650e12
    backward_flops: float = 590e12
    link_bytes: float = 390e9
    step_seconds: float = 12e-6
    call_seconds: float = 200e-6
    batch_seconds: float = 0.0
    message_seconds: float = 0.0
    topology: Topology | None = None
    between_bytes: float = 50e9
    between_seconds: float = 48e-6
    one_sided: bool = True
    memory_bytes: float = 3e12
    held_shards: float = math.inf
    gathered_bytes: float = 16.0 * (1 << 30)
    link_alone: float = 1.0
    between_alone: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.topology, Topology | None):
            raise TypeError(
                f"topology must be a Topology, got {self.topology!r}; CostModel.over reads a text"
            )
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type == "float" and (not isinstance(value, Real) or isinstance(value, bool)):
                raise TypeError(f"{each.name} of a CostModel must be a number, got {value!r}")
            waits = each.name.endswith("seconds")  # which may be 0
            if each.type == "float" and not (value > 0 or (waits and value == 0)):
                raise ValueError(f"{each.name} of a CostModel must be above 0, got {value!r}")
            if each.name.endswith("alone") and not 1 <= value <= 2:
                raise ValueError(f"{each.name} of a CostModel must be 1 to 2, got {value!r}")

    def usual_batch_seconds(self, plan: PlanValue | None = None) -> float:
        """What a batch costs the host where messages are not counted: of one each way with each
        other rank of its host, and four more; on one host, of four in all.

        Args:
            plan: one over several hosts. Then a rank has messages for one rank, or in a single step
                two, of each host that has keys for its own; or, where teams split heads, for all
                ranks that have some.
        """
        near = 1 if self.topology is None else max(self.topology.hosts)
        messages = 2 * (near - 1) + 4
        if plan is not None and plan.topology is not None:
            relays, met = 1 if plan.steps_with_keys > 1 else 2, plan.met_in_a_step
            messages = 2 * (near - 1 + relays * met) if plan.relays else 2 * met
        return self.batch_seconds + messages * self.message_seconds

    @staticmethod
    def over(hosts: Topology | str) -> CostModel:
        """The rates that groups of GPUs on these hosts are planned with until they have measured
        their links. They are of H200s that send messages, and hold at most four shards of others'
        keys; on one host they are :data:`H200`, of GPUs that write into one another's memory.

        Args:
            hosts: as text 8x4, which is 8 hosts of 4 ranks, or 4,4,2.
        Raises:
            ValueError: there are no such hosts.
            TypeError: ``hosts`` is neither.
        """
        topology = Topology.parse(hosts) if isinstance(hosts, str) else hosts
        if not isinstance(topology, Topology):
            raise TypeError(f"hosts are a Topology, or a text such as 8x4, got {hosts!r}")
        several = len(topology.hosts) > 1
        return replace(H200_NCCL, topology=topology, held_shards=HELD_SHARDS) if several else H200

    def with_rates(self, text: str, name: str) -> CostModel:
        """This model with the rates that ``text`` gives, such as ``link_bytes=2e9,held_shards=8``.

        Args:
            name: of the source of ``text``, for errors.
        Raises:
            ValueError: ``text`` is not of this form, or a rate is not a number above 0.
        """
        rates = [f.name for f in fields(self) if f.name not in ("topology", "one_sided")]
        parts = [part.strip() for part in text.split(",")]
        given = dict(part.partition("=")[::2] for part in parts if part)
        try:
            found: Any = {rates[rates.index(rate)]: float(value) for rate, value in given.items()}
        except ValueError:
            found = {"": 0.0}
        unbounded, free = {"held_shards", "gathered_bytes"}, {"batch_seconds", "message_seconds"}
        if not all(
            0 < value < math.inf or rate in unbounded or (rate in free and value == 0)
            for rate, value in found.items()
        ):
            raise ValueError(
                f"{name} gives numbers above 0 for some of {', '.join(rates)}, as link_bytes=2e9, "
                f"not {text!r}"
            )
        try:
            return replace(self, **found)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def attend_seconds(
        self, pairs: npt.ArrayLike, heads: npt.ArrayLike, head_dim: int, v_dim: int
    ) -> tuple[Seconds, Seconds]:
        """Time to attend ``pairs`` of ``heads`` heads, forward and backward, batch 1."""
        flops = np.asarray(pairs) * np.asarray(heads) * (2.0 * (head_dim + v_dim))
        return flops / self.forward_flops, 2.5 * flops / self.backward_flops

    def _start_seconds(self, plan: PlanValue, batches: Ints) -> Seconds:
        """float64[P]: time before the exchanges of one pass start to arrive. Over hosts each of so
        many batches of messages starts after the one before, and goes as far as the longest way. On
        one host rows and keys come at once, and the results of rows go home."""
        if plan.topology is not None:
            return np.asarray(batches, np.float64) * (self.step_seconds + self.between_seconds)
        keys = plan.kv_tokens().any(axis=1)
        rows = plan.q_tokens().any(axis=1) if plan.rows_move else np.zeros_like(keys)
        return np.add(keys | rows, rows, dtype=np.float64) * self.step_seconds

    def _level_seconds(self, plan: PlanValue, of: TokenBytes) -> tuple[Seconds, Seconds]:
        """float64[P] each: time on links for all that moves, and for rows alone. Of the links
        inside a host and those between hosts, those count that are busy for longer. ``of`` has the
        bytes of a token. A rank's messages come in batches, one after the other, and a batch takes
        as long as the way that has more of it: so keys that a rank gets and their gradients, which
        go the other way, add up."""
        keys, rows = plan.crossings
        seconds = []
        for level, rate in ((0, self.link_bytes), (1, self.between_bytes)):
            of_rows = rows[level].max(axis=1) * (of.row_out + of.row_back)
            moved = of_rows + keys[level].max(axis=1) * (of.key_out + of.key_back)
            seconds.append([each / rate for each in (moved, of_rows)])
        every, for_rows = zip(*seconds, strict=True)
        return np.maximum(*every), np.maximum(*for_rows)

    def passes(
        self,
        plan: PlanValue,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        v_dim: int,
        itemsize: int,
        reduce_itemsize: int | None = None,
    ) -> tuple[Pass, Pass]:
        """The forward and the backward pass, batch 1; sizes are those of ``backward_bytes``."""
        sizes = Sizes(q_heads, kv_heads, head_dim, v_dim, itemsize)
        moved = plan.forward_bytes(*sizes), plan.backward_bytes(*sizes, reduce_itemsize)
        shares = plan.heads_of_ranks(q_heads, kv_heads)
        heads = shares[:, 0]
        forward, backward = self.attend_seconds(plan.area, heads, head_dim, v_dim)
        rows = np.array(plan.q_layout.sizes) * plan.kv_tokens().any(axis=1)
        merged = (plan.steps_with_keys - 1) * rows / self.memory_bytes
        merges = [merged * of_row for of_row in sizes.merge_bytes(heads)]
        alone, parts = [np.zeros(plan.group_size)] * 2, math.inf
        if plan.topology is None:
            there, back = (each.max(axis=1) / self.link_bytes for each in moved)
        else:
            home = plan.home_itemsize(sizes, reduce_itemsize)
            there, alone[0] = self._level_seconds(plan, TokenBytes.forward(sizes, shares))
            back, alone[1] = self._level_seconds(plan, TokenBytes.backward(sizes, shares, home))
            parts = plan.steps_with_keys * plan.head_groups
            # What arrived in messages is read and written once more, to copy it to its place.
            placed = [2 * each[:, 1] / self.memory_bytes for each in moved]
            merges = [merge + place for merge, place in zip(merges, placed, strict=True)]
        calls, batches = plan.calls(kv_heads) * self.call_seconds, plan.batches_of_passes(kv_heads)
        batch = self.usual_batch_seconds(plan)
        launch = [calls + each * batch for each in batches]
        starts = [self._start_seconds(plan, each) for each in batches]
        overlap = not plan.gathered or plan.head_groups > 1
        return (
            Pass(forward, there + starts[0], merges[0], launch[0], overlap, alone[0], parts),
            Pass(backward, back + starts[1], merges[1], launch[1], overlap, alone[1], parts),
        )


def times_alone(alone: float) -> str:
    """What ``link_alone`` or ``between_alone`` adds to a text with the rate."""
    return f" ({alone:.3g} times that one way alone)" if alone > 1 else ""


# What a rank may hold of others' keys: in shards, over several hosts or above gathered_bytes; in
# bytes, in any case.
HELD_SHARDS, HELD_BYTES = 4.0, 128 << 20
H200 = CostModel()
# The same where ranks send and receive through NCCL: 103, 249 and 886 us for 16, 64 and 256 MiB.
H200_NCCL = CostModel(
    link_bytes=310e9,
    step_seconds=48e-6,
    batch_seconds=200e-6,
    message_seconds=5e-6,
    one_sided=False,
)
