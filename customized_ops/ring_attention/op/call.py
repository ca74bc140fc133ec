"""One attention call as a value, without its group and the data in its tensors; its plan, and the
kernel that runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from annotations.registry import OpRecord, registered_ops

from ..core.comm import Comm
from ..core.cost import H200, CostModel
from ..core.kernels import FEATURES, LARGE, Kernel, Request, Scoring, choose
from ..core.kernels.speeds import bucket
from ..core.plan import Plan, make_plan
from ..core.plan.heads import largest_share
from ..core.run import te_cp
from ..core.run.call_pairs import mask_class
from .arguments import ArgumentError, check_tensors
from .mask_source import Arguments, MaskSource, Problem, Shards
from .options import OP_OPTIONS, OPTIONAL_TENSORS, OpOptions
from .query_shards import KeyHeads, refuse_with_parts, rows_of


@dataclass(frozen=True)
class AttentionOp:
    """An attention op as it is declared.

    Attributes:
        name: ``namespace::op``.
        title: the public function's name, for errors.
        source: how its calls say which pairs attend.
        assignment: who computes what; see :func:`~.core.plan.make_plan`.
        split_heads: whether ranks of one host may share out heads inside the op, where that is
            faster. Ranks of several hosts always may, as fewer keys then cross between hosts.
    """

    name: str
    title: str
    source: type[MaskSource]
    assignment: str = "auto"
    split_heads: bool = True

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Name and type of every argument of the op in a graph, in order."""
        named: dict[str, Any] = dict.fromkeys(("q", "k", "v", *self.source.tensors), Tensor)
        named |= dict.fromkeys(OPTIONAL_TENSORS, Tensor | None)
        return {**named, **self.source.numbers, **OP_OPTIONS}

    @cached_property
    def record(self) -> OpRecord:
        """What engines read, with the ops of ``torch.library``, forward and backward."""
        return registered_ops()[self.name]

    def plan(
        self,
        problem: Problem,
        heads: tuple[int, int],
        head_dims: tuple[int, int],
        batch: int = 1,
        costs: CostModel = H200,
        team_size: int = 0,
        itemsize: int = 2,
    ) -> Plan:
        """The plan of a call with these heads of q and of k, and these head dims of q and of v."""
        return make_plan(
            problem.mask,
            problem.q_layout,
            problem.k_layout,
            assignment=self.assignment,
            heads=heads if heads[1] else (1, 1),
            head_dim=max(head_dims[0], 1),
            v_dim=max(head_dims[1], 1),
            batch=max(batch, 1),
            itemsize=itemsize,
            team_size=team_size or (None if self.split_heads or costs.topology else 1),
            costs=costs,
        )


class TensorSpec(NamedTuple):
    """A tensor without its data."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, t: Tensor) -> TensorSpec:
        return cls(t.shape, t.dtype, t.device)

    @property
    def planned_itemsize(self) -> int:
        """Bytes of an element for plans. On CPUs, whose links nobody measures, plans are those of
        GPUs with 16 bits, so batches planned ahead need not know where they will be attended."""
        return 2 if self.device.type == "cpu" else self.dtype.itemsize


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention op on one rank: all that is known of it without data and group.

    Attributes:
        q, k, v: the specs of this rank's tensors, as the op is given them.
        source: which pairs attend, decoded.
        given: which of the optional tensors are given.
    """

    op: AttentionOp
    q: TensorSpec
    k: TensorSpec
    v: TensorSpec
    source: MaskSource
    options: OpOptions
    given: tuple[bool, ...]

    @classmethod
    def of(
        cls,
        op: AttentionOp,
        qkv: Sequence[Tensor],
        source: MaskSource,
        options: OpOptions,
        optional: Sequence[Tensor | None],
    ) -> AttentionCall:
        """From tensors with data, all of it valid."""
        q, k, v = map(TensorSpec.of, qkv)
        return cls(op, q, k, v, source, options, tuple(t is not None for t in optional))

    @classmethod
    def decode(cls, op: AttentionOp, given: Arguments) -> AttentionCall:
        """From an op's arguments by name, whose tensors have data."""
        qkv = [given[name] for name in "qkv"]
        check_tensors(op.title, *qkv)
        optional = [given[name] for name in OPTIONAL_TENSORS]
        return cls.of(op, qkv, op.source.decode(given), OpOptions.decode(given), optional)

    @cached_property
    def _hash(self) -> int:
        return hash((self.op.name, self.q, self.k, self.v, self.source, self.options, self.given))

    def __hash__(self) -> int:
        return self._hash

    def encode(self) -> tuple[list[Tensor], list[Any]]:
        """The op's integer tensors, and its numbers except its group, in order."""
        tensors, numbers = self.source.encode(self.op.title)
        return list(tensors.values()), [*numbers.values(), *self.options]

    @cached_property
    def key_heads(self) -> KeyHeads | None:
        """The heads of k and v that belong to q's, where q has one part of its heads."""
        heads = self.q.shape[-2], self.k.shape[-2]
        return KeyHeads.of_call(self.op.title, self.options, *heads)

    @property
    def heads(self) -> tuple[int, int]:
        """Heads of q and of k that attend one another."""
        own = self.key_heads
        return self.q.shape[-2], self.k.shape[-2] if own is None else own.held

    def plan(self, comm: Comm) -> tuple[Plan, Any]:
        """The plan on a group, and the positions of keys or None."""
        title, options = self.op.title, self.options
        refuse_with_parts(title, options, comm.size)
        part_of_rows = options.row_parts > 0
        keys = self.k.shape[-3]
        rows = self.source.whole_rows(keys) if part_of_rows else self.q.shape[-3]
        slopes, layout = self.given[0], "" if part_of_rows else options.layout
        shards = Shards(comm, rows, keys, layout, options.k_layout, slopes)
        problem = self.source.problem(title, shards)
        if part_of_rows:
            parts = self.source.row_layout(options.layout, rows, options.row_parts)
            problem = rows_of(title, problem, options, self.q.shape[-3], slopes, parts)
        _check_team_size(title, options.team_size, comm.size, self.heads[0])
        dims, batch = (self.q.shape[-1], self.v.shape[-1]), self.q.shape[:-3].numel()
        given = dims, batch, comm.costs, options.team_size, self.q.planned_itemsize
        return self.op.plan(problem, self.heads, *given), problem.key_positions

    def kernel(self, scoring: Scoring, plan: Plan, comm: Comm) -> Kernel | te_cp.TeCall:
        """What runs the call: a kernel under the executor, or TransformerEngine's own.

        Raises:
            KernelError, ArgumentError: the kernel that was asked for cannot do this.
        """
        request, title, options = self._request(scoring, plan), self.op.title, self.options
        name = options.kernel
        if name not in te_cp.COMMS:
            return choose(title, name, request)
        for argument in ("reduce_dtype", "team_size"):
            if getattr(options, argument):
                raise ArgumentError(f"{title}: kernel {name!r} takes no {argument}; leave it None")
        q_heads, kv_heads = self.heads  # TransformerEngine splits them by itself
        return te_cp.choose(
            title,
            name,
            replace(request, q_heads=q_heads, kv_heads=kv_heads),
            plan,
            comm,
            scoring.softmax_scale,
            packed=self.source.packed,
            sink=self.given[1],
            deterministic=options.deterministic,
        )

    def asked_of(self, plan: Plan) -> tuple[str, bool, bool, int, int]:
        """What a kernel is asked for on account of the plan: the class of its mask, whether it must
        know windows, whether tensors are large, about how many tokens there are, and how many ranks
        share out the heads."""
        large = most_elements(plan, self.q, self.v, self.heads[1]) >= LARGE
        return *mask_class(plan), large, bucket(plan.mask.k_len), plan.team_size

    def _request(self, scoring: Scoring, plan: Plan) -> Request:
        """What a kernel is asked for, from the whole mask, so that all ranks ask for the same."""
        q, v, needs = self.q, self.v, dict.fromkeys(scoring.features, True)
        kind, needs["window"], needs["64-bit indices"], tokens, team = self.asked_of(plan)
        needs["lse gradient"] = self.options.return_lse
        needs["deterministic"] = self.options.deterministic
        share = largest_share(*self.heads, team)
        return Request(
            device=q.device,
            dtype=q.dtype,
            head_dim=q.shape[-1],
            v_dim=v.shape[-1],
            q_heads=share.q_heads,
            kv_heads=share.kv_heads,
            features=tuple(name for name in FEATURES if needs.get(name)),
            shape_class=kind,
            tokens=tokens,
        )


def most_elements(plan: Plan, q: TensorSpec, v: TensorSpec, kv_heads: int) -> int:
    """An upper bound on the elements of any tensor that a kernel call gets, on any rank. A rank's
    own tokens count with all heads, because its share is a view of them; received tokens count with
    the share only."""
    q_heads, batch = q.shape[-2], q.shape[0] if len(q.shape) == 4 else 1
    each = batch * max(q.shape[-1], v.shape[-1])  # of a token and head
    # No rank has more than all tokens. That is less exact, but quick, and usually decides.
    in_all = each * max(plan.q_layout.total * q_heads, plan.k_layout.total * kv_heads)
    if in_all < LARGE:
        return in_all
    share, team = largest_share(q_heads, kv_heads, plan.team_size), plan.team_size > 1
    sizes = []
    for held, moved, heads, of_share in (
        (plan.q_layout, plan.q_tokens(), q_heads, share.q_heads),
        (plan.k_layout, plan.kv_tokens(), kv_heads, share.kv_heads),
    ):
        own, received = np.asarray(held.sizes), moved[:, 1]
        # What ranks of a team send each other, and gathered keys, include the rank's own tokens.
        arrived = received + own if team or held is plan.k_layout else received
        sizes += [own.max() * heads, arrived.max() * of_share]
    return each * int(max(sizes))


def _check_team_size(op: str, team_size: int, ranks: int, q_heads: int) -> None:
    """A team must be a part of the group, with a query head for each of its ranks."""
    if not team_size or (ranks % team_size == 0 and team_size <= max(q_heads, 1)):
        return
    fits = [n for n in range(1, ranks + 1) if ranks % n == 0 and n <= max(q_heads, 1)]
    raise ArgumentError(
        f"{op}: team_size={team_size} must divide the group's {ranks} ranks and be at most the "
        f"{q_heads} heads of q; {', '.join(map(str, fits))} would fit, or None"
    )
