"""Every op and mask in bf16 over ranks, by every kernel: no worse than twice one rank's error.

On GPUs over NCCL and over symmetric memory, and with what a CPU has over gloo. A test for each op,
for each mask and for each kernel and mask, so that what takes long is seen: flash-attn-4 compiles
for seconds for each kind of window and number of intervals a row, cuDNN for each shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import kernel_jobs
import pytest
from kernel_jobs import Answer, Cases
from op_cases import Case, run_rank
from op_table import TABLE, UNEVEN
from rank_groups import Groups, comms, device_of, whole
from ranks import Pool, worlds
from verdicts import Named, check, low, lows

from customized_ops.ring_attention.core.kernels import KERNELS
from tests.kernels.masks import MASKS as SHAPES
from tests.ops.masks.test_mask_grid import MASKS

COMPILES_SHAPES = ("te", "cudnn")


def over(ranks: Pool) -> list[Groups]:
    """All ranks, in every way that they may be connected."""
    return [Groups(whole(ranks.size), comm) for comm in comms(ranks)]


def uneven(total: int, ranks: int) -> tuple[int, ...]:
    """Shares that grow from rank to rank."""
    bounds = [total * n * (n + 1) // (ranks * (ranks + 1)) for n in range(ranks + 1)]
    return tuple(b - a for a, b in pairwise(bounds))


def first_most(total: int, ranks: int) -> tuple[int, ...]:
    """Nine tokens on each rank but the first, which has the rest."""
    return (total - 9 * (ranks - 1), *[9] * (ranks - 1))


def even(total: int, ranks: int) -> tuple[int, ...]:
    """As many on every rank, but for the last."""
    each = total // ranks
    return (*[each] * (ranks - 1), total - each * (ranks - 1))


def cases_of(op: str, ranks: int) -> dict[str, Case]:
    """The table's, and a longer one."""
    longer = Case(op, 512, cu_seqlens=(0, 200, 512))
    cases = {n: case for n, case in {**TABLE, **UNEVEN[ranks]}.items() if case.op == op}
    return cases | ({"longer": longer} if op in ("ring", "zigzag", "varlen") else {})


OPS = sorted({case.op for case in TABLE.values()})


@pytest.fixture(scope="module")
def compiled_by() -> set[str]:
    """Pools that have compiled what all tests here want."""
    return set()


@pytest.fixture
def compiled(ranks: Pool, compiled_by: set[str]) -> None:
    """Four and more GPUs share out first what they would all compile at the same time."""
    if ranks.backend == "nccl" and ranks.size > 2 and str(ranks) not in compiled_by:
        compiled_by.add(str(ranks))
        cases = [case for op in OPS for case in cases_of(op, ranks.size).values()]
        cases += [Case("masked", mask.q_len, given=mask) for mask in MASKS.values()]
        wanted = [low(case, "auto", "cuda") for case in cases]
        wanted += [case for name in SHAPES for case in shapes(name, ranks, "auto", even).values()]
        ranks.run(kernel_jobs.compile_alone, wanted)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("op", OPS)
@worlds(cpus=[2])
def test_every_op(ranks: Pool, op: str) -> None:
    cases = cases_of(op, ranks.size)
    if ranks.backend == "gloo":  # where every op is compared exactly elsewhere
        cases = {name: cases[name] for name in list(cases)[::4]}
    assert not check(ranks, [lows(cases, device_of(ranks))], over(ranks))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("name", MASKS)
@worlds(cpus=[2])
def test_every_mask(ranks: Pool, name: str) -> None:
    n = MASKS[name].q_len
    case = Case("masked", n, given=MASKS[name], layout=f"contiguous:{n}:{ranks.size}")
    assert not check(ranks, [lows({name: case}, device_of(ranks))], over(ranks))


def shapes(name: str, ranks: Pool, kernel: str, *ways: Callable[..., Any]) -> Named:
    """A mask of several tiles of every kernel, its rows and its keys cut in each of these ways."""
    mask = SHAPES[name].make(640 if ranks.backend == "nccl" else 120)
    base = low(Case("masked", mask.q_len, given=mask), kernel, device_of(ranks))
    cut = {}
    for way in ways:
        keys = first_most if way is uneven else way
        sizes = way(mask.q_len, ranks.size), keys(mask.k_len, ranks.size)
        cut[f"{name}, {way.__name__}"] = replace(base, sizes=sizes[0], k_sizes=sizes[1])
    return cut


@pytest.mark.thin(3)
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("name", SHAPES)
@worlds(cpus=[4, 8], gpus=[4, 8])
def test_every_shape_of_mask(ranks: Pool, name: str) -> None:
    assert not check(ranks, [shapes(name, ranks, "auto", uneven, even)], over(ranks))


@pytest.mark.thin(6)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kernel", KERNELS)
@worlds(cpus=[2], gpus=[2])
def test_every_kernel(ranks: Pool, kernel: str, name: str) -> None:
    """Evenly too but for kernels that compile for every shape."""
    ways = (uneven,) if kernel in COMPILES_SHAPES else (uneven, even)
    refused = check(ranks, [shapes(name, ranks, kernel, *ways)], over(ranks)[:1])
    assert kernel != "reference" or not refused


class Bent:
    """A pool of one whose cut results are off."""

    def __init__(self, by: float) -> None:
        self.by = by

    def run(self, job: object, rows: Cases, *_: Any) -> list[list[Answer]]:
        answers = []
        for case in rows[0]:
            alone = run_rank(case, 0, 1, None)
            answers.append(Answer(0, [[t + self.by for t in alone]], alone))
        return [answers]


@pytest.mark.parametrize("exact", [False, True])
def test_the_check_can_fail(exact: bool) -> None:
    """And says all that is wrong."""
    one = Case("ring", 32)
    cases = {name: one if exact else low(one, "reference", "cpu") for name in ("first", "second")}
    alone = [Groups(whole(1))]
    assert check(Bent(0.0), [cases], alone) == []
    for name in cases:
        with pytest.raises(AssertionError, match=rf"{name}, row 0, .*: out: .*\n.*: lse: "):
            check(Bent(0.3), [cases], alone)
