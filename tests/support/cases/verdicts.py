"""What is wrong with cases that the ranks of a pool ran: all of it, not only the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol

import kernel_jobs
import torch
from dense import assert_same
from kernel_jobs import Answer, Failure, KernelCase
from op_cases import NAMES, Case, expected, gather
from rank_groups import Groups
from torch import Tensor

from tests.kernels.conformance import assert_near

Named = Mapping[str, Case]


class Ranks(Protocol):
    """A pool, or what stands for one."""

    def run(self, job: Callable[..., Any], *args: Any) -> list[list[Answer]]:
        """See :class:`~ranks.Pool`."""
        ...


def low(case: Case, kernel: str, device: str) -> KernelCase:
    """The case in bf16, with one number of heads and one width, so that kernels compile little."""
    given = {f.name: getattr(case, f.name) for f in fields(Case)}
    given |= {"dtype": torch.bfloat16, "device": device, "dims": (64, 64), "heads": (8, 2)}
    return KernelCase(**given, kernel=kernel)


def lows(cases: Named, device: str) -> Named:
    """All of them so, by the kernel that is the fastest."""
    return {name: low(case, "auto", device) for name, case in cases.items()}


def on(device: str, cases: Named) -> Named:
    """The cases on another device."""
    return {name: replace(case, device=device) for name, case in cases.items()}


def check(
    pool: Ranks,
    rows: Sequence[Named],
    over: Sequence[Groups],
    *args: Any,
    job: Callable[..., list[Answer]] = kernel_jobs.cut_and_alone,
) -> list[str]:
    """Run the cases of each row of groups, and judge all that run.

    fp64 is compared to 1e-10; lower precision may be twice as far off as one rank alone.

    Args:
        over: groups of the same rows, all of which run all cases. args: further ones of the job.
    Returns:
        The cases that their kernel refuses.
    """
    replies = pool.run(job, [list(cases.values()) for cases in rows], over, *args)
    refused: list[str] = []
    wrong: list[str] = []
    for row, cases in enumerate(rows):
        ranks = [reply for reply in replies if reply and reply[0].row == row]
        assert len(ranks) == len(over[0].rows[row])
        for n, (name, case) in enumerate(cases.items()):
            answers = [rank[n] for rank in ranks]
            texts = _refusals(case, answers)
            refused += [name] if texts else []
            if not texts:
                wrong += [f"{name}, row {row}, {line}" for line in _judged(case, answers, over)]
    assert not wrong, "\n".join(wrong)
    return refused


def _refusals(case: Case, answers: Sequence[Answer]) -> set[str]:
    """What the case's kernel says that cannot run it: cut, on all ranks the same, or whole."""
    cuts = [part for answer in answers for part in answer.cut]
    said = [part.text for part in cuts if isinstance(part, Failure) and part.refused]
    if said:
        assert len(set(said)) == 1 and len(said) == len(cuts), said
    wholes = [answer.alone for answer in answers]
    said += [whole.text for whole in wholes if isinstance(whole, Failure) and whole.refused]
    for text in said:
        assert f"kernel {getattr(case, 'kernel', 'auto')!r} cannot do this" in text
    return set(said)


def _judged(case: Case, answers: Sequence[Answer], over: Sequence[Groups]) -> list[str]:
    alone = next((a.alone for a in answers if a.alone is not None), None)
    if isinstance(alone, Failure):
        return [f"alone: {alone.text}"]
    want, wrong = expected(case), []
    for n, groups in enumerate(over):
        parts = [answer.cut[n] for answer in answers]
        failures = [f"rank {r}: {p.text}" for r, p in enumerate(parts) if isinstance(p, Failure)]
        if failures:
            wrong += [f"{groups.comm}, {failure}" for failure in failures]
            continue
        got = gather(case, [p for p in parts if not isinstance(p, Failure)])
        assert len(got) == len(want)
        for m, (what, a, b) in enumerate(zip(NAMES, got, want, strict=False)):
            try:
                _compare(what, a, b, case.dtype, None if alone is None else alone[m])
            except AssertionError as error:
                wrong.append(f"{groups.comm}: {error}")
    return wrong


def _compare(name: str, got: Tensor, want: Tensor, dtype: torch.dtype, alone: Any) -> None:
    if dtype == torch.float64:
        assert_same(name, got, want)
    else:
        assert_near(name, got, want, alone, dtype)
