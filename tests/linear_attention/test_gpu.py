"""flash-linear-attention in bf16, on one GPU and over ranks, against the recurrence in fp64.

What rounding q, k and v to bf16 makes of a result is its usual error. The library may be twice as
far off, and a rounding of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import recurrent_jobs
import torch
from linear_cases import LinearCase
from ranks import Pool, worlds
from torch import Tensor

from customized_ops.linear_attention.kernels import fla

pytestmark = pytest.mark.gpu
KINDS = [(delta, channels) for delta in (True, False) for channels in (False, True)]
HALF = LinearCase(
    300, heads=(2, 4), dims=(64, 64), decay=0.1, kernel="fla", dtype=torch.bfloat16, device="cuda"
)
PACKED = replace(HALF, batch=1, lengths=(1, 130, 0, 64, 105), layout="uneven")


def cases(delta: bool, channels: bool) -> list[LinearCase]:
    """Packed or not, with states or without."""
    of_kind = [replace(case, delta=delta, channels=channels) for case in (HALF, PACKED)]
    return [replace(case, states=states) for case in of_kind for states in ("both", "")]


def check(case: LinearCase, found: Sequence[Tensor]) -> None:
    """Every result is as near to the recurrence as bf16 lets it be."""
    exact, unrounded = case.expected(), replace(case, dtype=torch.float64).expected()
    names, wrong = ["out", *["final"] * case.final, *case.given], []
    for name, x, y, z in zip(names, found, exact, unrounded, strict=True):
        usual = (y - z).norm() + torch.finfo(case.dtype).eps * y.norm()
        ratio = ((x - y).norm() / usual).item()
        print(f"{name} {ratio:.2f}", end="  ")
        if not ratio <= 2:
            wrong.append(f"{name} {ratio:.2f}")
    assert not wrong, f"{case}: times the usual error: {', '.join(wrong)}"


@pytest.fixture(autouse=True)
def _installed() -> None:
    if (missing := fla.missing()) is not None:
        pytest.skip(missing)


@pytest.mark.parametrize(("delta", "channels"), KINDS)
def test_one_gpu(delta: bool, channels: bool) -> None:
    for case in cases(delta, channels):
        check(case, case.assembled([case.on_rank(None, 0, 1)]))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("delta", "channels"), KINDS)
@worlds()
def test_ranks(ranks: Pool, delta: bool, channels: bool, layout: str) -> None:
    """Over ranks as on one GPU."""
    every = [replace(case, layout=layout) for case in cases(delta, channels)]
    replies = ranks.run(recurrent_jobs.parts_of, every)
    for case, parts in zip(every, zip(*replies, strict=True), strict=True):
        check(case, case.assembled(parts))
