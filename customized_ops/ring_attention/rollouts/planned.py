"""Rollouts packed with their layout and plan, in a worker or a thread, before the step that needs
them."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from ..ahead import made_ahead, require_planned_for, require_same
from ..core.cost import H200, CostModel
from ..core.layout import Layout
from ..core.plan.heads import head_counts
from ..core.plan.plan import expect
from ..core.run.call_pairs import prepare
from ..masked_attn import MASKED_ATTN
from ..op.arguments import ArgumentError, flag_of, is_integer
from ..op.mask_source import Problem
from ..op.tokens.token_rows import each_of
from .packed import pack_rollouts
from .part import RolloutPart

Rollouts = Sequence[tuple[Any, int]]  # the ids of each, and how many of its first are its prompt


@dataclass(frozen=True)
class PackRollouts:
    """From rollouts to one rank's :class:`RolloutPart`, over ``Layout.balanced`` and with its plan:
    the ``collate_fn`` of a DataLoader, whose workers then plan ahead. Every rank must get the same
    rollouts in the same order. Each is a pair: the ids of its tokens, prompt and answer in one, and
    the length of its prompt.

    Attributes:
        ranks, rank: of the group that attends together.
        heads: query and key heads of the model.
        share: whether shared prefixes are packed once, as :func:`pack_rollouts` takes it.
        costs: rates that plans are chosen by, and hosts that layouts go by; give those of the
            group, :func:`.group_costs`, or attention plans again in the step.
        head_dim: of the model. Attention of other heads plans again in the step.
        itemsize: bytes of an element of q: 4 for attention in fp32 on GPUs, else leave it.
    """

    ranks: int
    rank: int
    heads: tuple[int, int]
    share: bool = True
    costs: CostModel = H200
    head_dim: int = 128
    itemsize: int = 2

    def __post_init__(self) -> None:
        share = flag_of("PackRollouts", "share", self.share)
        vars(self).update(heads=head_counts("PackRollouts", self.heads), share=share)
        require_planned_for("PackRollouts", self)

    def __call__(self, rollouts: Rollouts) -> RolloutPart:
        """Pack rollouts: of each the ids of its tokens, and how many of its first are its prompt.

        Raises:
            ArgumentError: one is not such a pair, and as :func:`pack_rollouts`.
        """
        started = perf_counter()
        rollouts = each_of("PackRollouts", "rollouts", rollouts)
        for n, rollout in enumerate(rollouts):
            if not _is_pair(rollout):
                raise ArgumentError(
                    f"PackRollouts: rollouts[{n}] must be a pair of tokens and the length of its "
                    f"prompt, got {reprlib.repr(rollout)}"
                )
        rows, prompts = zip(*rollouts, strict=True) if rollouts else ((), ())
        packed = pack_rollouts(rows, prompts, share=self.share)
        layout = Layout.balanced(packed.mask, self.ranks, topology=self.costs.topology)
        problem, dims = Problem(packed.mask, layout, layout), (self.head_dim, self.head_dim)
        sizes = self.heads, dims
        plan = MASKED_ATTN.plan(problem, *sizes, costs=self.costs, itemsize=self.itemsize)
        prepare(plan, self.rank)
        expect(plan, perf_counter() - started)
        return replace(packed.part(layout, self.rank), plan=plan, packed_by=self)

    def made(self, given: Rollouts | RolloutPart) -> RolloutPart:
        """What a loader gives, packed; or taken, if it is a part.

        Raises:
            ValueError: a part is packed for other ranks, or for other attention.
        """
        if not isinstance(given, RolloutPart):
            return self(given)
        if given.packed_by is not None:
            require_same(given.packed_by, self, "rollout_parts")
        return given


def _is_pair(rollout: Any) -> bool:
    if not isinstance(rollout, (tuple, list)) or len(rollout) != 2:
        return False
    tokens, prompt = rollout
    return not is_integer(tokens) and not isinstance(prompt, Sequence) and np.ndim(prompt) == 0


def rollout_parts(
    loader: Iterable[Rollouts | RolloutPart],
    *,
    ranks: int,
    rank: int,
    heads: tuple[int, int],
    share: bool = True,
    costs: CostModel = H200,
    head_dim: int = 128,
    itemsize: int = 2,
    ahead: int = 2,
) -> Iterator[RolloutPart]:
    """Parts of rollouts of one rank, packed and planned ahead in a thread.

    Args:
        loader: of rollouts as :class:`PackRollouts` takes them, the same on every rank. Or of
            :class:`RolloutPart`, from one whose ``collate_fn`` is :class:`PackRollouts` of the same
            arguments: these are passed on.
        ahead: parts that are made before they are asked for.

    The other arguments are those of :class:`PackRollouts`.

    Raises:
        ValueError: ``ahead`` is not positive, or ``loader`` gives parts that were packed with
            other arguments. What ``loader`` raises, or :class:`PackRollouts`, is raised where its
            part is due.
    """
    pack = PackRollouts(ranks, rank, heads, share, costs, head_dim, itemsize)
    return made_ahead(loader, pack.made, ahead, "rollout_parts")
