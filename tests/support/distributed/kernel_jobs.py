"""Jobs for op calls, by kernels by name or not, beside the same on one rank; see ``ranks.Pool``."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from op_cases import Case, run_rank
from rank_groups import Groups, Place, in_their_own_time, place_in
from torch import Tensor

from customized_ops.ring_attention.core.kernels import KernelError
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.op import bound, call

LATE_SECONDS = 0.3


@dataclass(frozen=True)
class KernelCase(Case):
    """A case of the ops, with the kernel that runs it."""

    kernel: str = "auto"

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None, **where: Any
    ) -> Any:
        """See :class:`~op_cases.Case`."""
        return super().call(q, k, v, sink, kernel=self.kernel, **where)


@dataclass(frozen=True)
class Failure:
    """What was said instead of an answer; ``refused`` by the kernel, or some other error."""

    text: str
    refused: bool


@dataclass(frozen=True)
class Answer:
    """What a rank has of a case.

    Attributes:
        row: of the groups, in which the rank is.
        cut: this rank's part of the results, over each of the groups.
        alone: the whole, in the case's own dtype, where it is this rank that computed it.
    """

    row: int
    cut: list[list[Tensor] | Failure]
    alone: list[Tensor] | Failure | None


Cases = Sequence[Sequence[Case]]


def cut_and_alone(cases: Cases, over: Sequence[Groups], late: int = -1) -> list[Answer]:
    """The cases of this rank's row, cut over its group of each of ``over``, and whole on one rank.

    One rank of a row computes one case whole, so that what kernels compile for it is compiled on
    all at once. fp64 is compared exactly, and nothing is computed whole.

    Args:
        cases: those of each row; all ``over`` have the same rows.
        late: a global rank that starts late.
    """
    places = [place for place in map(place_in, over) if place is not None]
    if not places:
        return []
    if dist.get_rank() == late:
        time.sleep(LATE_SECONDS)
    first = places[0]
    mine, wholes = cases[first.row], {}
    answers = []
    for n, case in enumerate(mine):
        if n % first.size == 0 and n + first.rank < len(mine):
            wholes = {n + first.rank: _alone(mine[n + first.rank])}
        cut = [_tried(case, place) for place in places]
        answers.append(Answer(first.row, cut, wholes.get(n)))
        if case.device == "cuda":
            torch.cuda.empty_cache()
    return answers


@in_their_own_time
def in_step_with_nobody(cases: Cases, over: Sequence[Groups], late: int = -1) -> list[Answer]:
    """The same where ranks do not compare their calls, which would keep them in step."""
    return cut_and_alone(cases, over, late)


def compile_alone(cases: Sequence[Case]) -> None:
    """Run each case whole on one rank, so that what kernels compile for it is in their cache.

    Neighbours, which are alike, go to one rank. What is wrong with them is for others to say.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for case in cases[rank * len(cases) // ranks : (rank + 1) * len(cases) // ranks]:
        _alone(case)


def in_teams(cases: Cases, over: Sequence[Groups], team_size: int) -> list[Answer]:
    """The same, heads split ``team_size`` ways though it may not be the fastest.

    Plans are remembered by group, so ``over`` must serve one team size only.
    """
    return _planned_with(cases, over, team_size=team_size)


def in_head_groups(cases: Cases, over: Sequence[Groups], head_groups: int) -> list[Answer]:
    """The same, keys arriving in so many groups of heads though it may not be the fastest."""
    return _planned_with(cases, over, head_groups=head_groups, team_size=1, stages=1)


def _planned_with(cases: Cases, over: Sequence[Groups], **choice: int) -> list[Answer]:
    with _plans_of(choice) as ran:
        answers = cut_and_alone(cases, over)
    what, wanted = next(iter(choice.items()))
    assert {getattr(plan, what) for plan in ran} == ({wanted} if answers else set())
    return answers


@contextmanager
def _plans_of(choice: dict[str, int]) -> Iterator[list[Plan]]:
    """Plans of such a choice; yields those that are run over several ranks."""
    ran: list[Plan] = []
    forward = bound.attention_forward

    def plan(*args: Any, **options: Any) -> Any:
        ranks = args[1].group_size
        return make_plan(*args, **{**options, **(choice if ranks > 1 else {"team_size": 1})})

    def recorded(plan: Any, *args: Any, **options: Any) -> Any:
        ran.extend([plan] * (plan.group_size > 1))
        return forward(plan, *args, **options)

    with (
        patch.object(call, "make_plan", plan),
        patch.object(bound, "attention_forward", recorded),
    ):
        yield ran


def _alone(case: Case) -> list[Tensor] | Failure | None:
    if case.dtype == torch.float64:
        return None
    whole = replace(case, layout=None, k_layout=None, sizes=None, k_sizes=None)
    return _or_failure(lambda: run_rank(whole, 0, 1, None))


def _tried(case: Case, place: Place) -> list[Tensor] | Failure:
    return _or_failure(lambda: run_rank(case, place.rank, place.size, place.group))


def _or_failure(run: Callable[[], list[Tensor]]) -> list[Tensor] | Failure:
    """Results on the host; or what went wrong, for the other ranks go on too."""
    try:
        return [t.cpu() for t in run()]
    except KernelError as error:
        return Failure(str(error), True)
    except Exception:
        return Failure(traceback.format_exc(), False)
