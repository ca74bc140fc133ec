"""Rollouts packed with their layout and plan, in a worker or a thread, before the step that needs
them."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from ..batches_ahead import made_ahead, require_planned_for, require_same
from ..core.cost import H200, CostModel
from ..core.layout import Layout
from ..core.plan.heads import grouped_heads
from ..core.plan.plan import expect
from ..core.run.call_pairs import prepare
from ..masked_attn import MASKED_ATTN
from ..op.arguments import ArgumentError, flag_of, is_integer
from ..op.mask_source import Problem
from ..op.tokens.token_rows import each_of
from .packed import pack_rollouts
from .part import RolloutPart

Rollouts = Sequence[tuple[Any, int]]  # token ids, and how many of the first are the prompt


@dataclass(frozen=True)
class PackRollouts:
    """Turns rollouts into one rank's :class:`RolloutPart`, over ``Layout.balanced`` and with its
    plan. As the ``collate_fn`` of a DataLoader, it lets the workers plan ahead. Every rank must get
    the same rollouts in the same order. Each rollout is a pair: its token ids, prompt and answer
    together, and the length of its prompt.

    Attributes:
        ranks, rank: size of the group that attends together, and this rank in it.
        heads: query and key heads of the model.
        share: whether shared prefixes are packed once, as in :func:`pack_rollouts`.
        costs: the rates by which plans are chosen, and the hosts that layouts respect. Give those
            of the group, :func:`.group_costs`; otherwise attention plans again in the step.
        head_dim: of the model. Attention with other heads plans again in the step.
        itemsize: bytes of an element of q: 4 for attention in fp32 on GPUs; otherwise leave it.
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
        vars(self).update(heads=grouped_heads("PackRollouts", self.heads), share=share)
        require_planned_for("PackRollouts", self)

    def __call__(self, rollouts: Rollouts) -> RolloutPart:
        """Pack rollouts, each given by its token ids and how many of the first are its prompt.

        Raises:
            ArgumentError: a rollout is not such a pair; also as for :func:`pack_rollouts`.
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
        """The part made of what a loader gives; a part is passed on.

        Raises:
            ValueError: a part was packed for other ranks, or for other attention.
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
    """One rank's parts of rollouts, packed and planned ahead in a thread.

    Args:
        loader: gives rollouts as :class:`PackRollouts` takes them, the same on every rank. It may
            also give :class:`RolloutPart`, if its ``collate_fn`` is :class:`PackRollouts` with the
            same arguments; these are passed on.
        ahead: how many parts are made before they are asked for.

    The other arguments are those of :class:`PackRollouts`.

    Raises:
        ValueError: ``ahead`` is not positive, or ``loader`` gives parts that were packed with
            other arguments. Errors of ``loader`` and of :class:`PackRollouts` are raised where
            their part is due.
    """
    pack = PackRollouts(ranks, rank, heads, share, costs, head_dim, itemsize)
    return made_ahead(loader, pack.made, ahead, "rollout_parts")
