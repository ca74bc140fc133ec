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
    """Packed or not, with states or without; of models' dims."""
    of_kind = [replace(case, delta=delta, channels=channels) for case in (HALF, PACKED)]
    wide = [replace(case, dims=(128, 128 if delta else 64), states="") for case in of_kind]
    return wide + [replace(case, states=states) for case in of_kind for states in ("both", "")]


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


@pytest.mark.parametrize("policy", ["cp", "ulysses"])
@pytest.mark.parametrize("layers", ["da", "ga"])
@worlds()
def test_parallelized(ranks: Pool, layers: str, policy: str) -> None:
    """By the engine, with the kernels that "auto" takes: no further from fp64 than twice one GPU's
    bf16."""
    lengths = (700, 1, 300, 1047)
    for exact, alone, found in ranks.run(recurrent_jobs.in_bf16, layers, policy, lengths):
        for name, value in exact.items():
            usual, off = ((x[name] - value).norm().item() for x in (alone, found))
            most = 2 * usual + torch.finfo(torch.bfloat16).eps * value.norm().item()
            assert off <= most, f"{name}: {off:.1e}, alone {usual:.1e}"


@worlds()
def test_nothing_waits_for_the_gpu(ranks: Pool) -> None:
    assert ranks.run(recurrent_jobs.calls_without_waiting, 8) == [""] * ranks.size
