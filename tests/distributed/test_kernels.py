"""Every op and mask in bf16 on two ranks, by every kernel: no worse than twice one rank's error.

On GPUs over NCCL, and with what a CPU has over gloo. A test for each op, for each mask and for each
kernel and mask, so that what takes long is seen: flash-attn-4 compiles some seconds for every kind
of window and for every number of intervals a row, cuDNN for every shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
import torch
from kernel_jobs import Answer, KernelCase, cut_and_alone
from op_cases import Case, expected, gather, run_rank
from op_table import TABLE, UNEVEN
from ranks import Pool

from customized_ops.ring_attention.core.kernels import KERNELS
from tests.kernels.cases import MASKS as SHAPES
from tests.kernels.conformance import assert_near
from tests.ops.test_mask_grid import MASKS

NAMES = ("out", "lse", "dq", "dk", "dv", "dsink")
COMPILE_SECONDS = 300  # the first case of a configuration takes seconds
COMPILES_SHAPES = ("te", "cudnn")
DTYPE = torch.bfloat16


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where the ranks compute."""
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return request.param


@pytest.fixture(scope="module")
def ranks(device: str) -> Iterator[Pool]:
    """Two of them."""
    pool = Pool(2, "nccl" if device == "cuda" else "gloo", seconds=COMPILE_SECONDS)
    yield pool
    pool.close()


def low(case: Case, kernel: str, device: str) -> KernelCase:
    """The case in bf16, with one number of heads and one width, so that kernels compile little."""
    given = {f.name: getattr(case, f.name) for f in fields(case)}
    given |= {"dtype": DTYPE, "device": device, "dims": (64, 64), "heads": (8, 2)}
    return KernelCase(**given, kernel=kernel)


def check(pool: Pool | Bent, cases: dict[str, KernelCase]) -> list[str]:
    """Judge all that run; returns those that their kernel refuses."""
    replies = pool.run(cut_and_alone, list(cases.values()))
    refused, wrong = [], []
    for n, (name, case) in enumerate(cases.items()):
        answers = [reply[n] for reply in replies]
        if isinstance(answers[0], str):
            assert answers[0] == answers[1]
            assert f"kernel {case.kernel!r} cannot do this" in answers[0]
            refused.append(name)
            continue
        got = gather(case, [cut for cut, _ in answers])
        alone = answers[0][1]
        for what, *values in zip(NAMES, got, expected(case), alone, strict=False):
            try:
                assert_near(what, *values, DTYPE)
            except AssertionError as error:
                wrong.append(f"{name}: {error}")
    assert not wrong, "\n".join(wrong)
    return refused


OPS = {**TABLE, **UNEVEN[2]}


@pytest.mark.parametrize("op", sorted({case.op for case in OPS.values()}))
def test_every_op(ranks: Pool, device: str, op: str) -> None:
    names = [name for name, case in OPS.items() if case.op == op]
    if device == "cpu":  # where every op is compared exactly elsewhere
        names = names[::4]
    assert not check(ranks, {name: low(OPS[name], "auto", device) for name in names})


@pytest.mark.parametrize("name", MASKS)
def test_every_mask(ranks: Pool, device: str, name: str) -> None:
    n = MASKS[name].q_len
    case = Case("masked", n, given=MASKS[name], layout=f"contiguous:{n}:2")
    assert not check(ranks, {name: low(case, "auto", device)})


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel(ranks: Pool, device: str, kernel: str, name: str) -> None:
    """Longer masks, several tiles of every kernel, laid out unevenly, and evenly but for kernels
    that compile for every shape."""
    mask = SHAPES[name].make(640 if device == "cuda" else 120)
    q, k = mask.q_len, mask.k_len
    base = low(Case("masked", q, given=mask), kernel, device)
    cases = {"uneven": replace(base, sizes=(q // 3, q - q // 3), k_sizes=(k - 9, 9))}
    if kernel not in COMPILES_SHAPES:
        cases["even"] = replace(base, sizes=(q // 2, q - q // 2), k_sizes=(k // 2, k - k // 2))
    refused = check(ranks, cases)
    assert kernel != "reference" or not refused


class Bent:
    """A pool of one whose cut results are off."""

    def __init__(self, by: float) -> None:
        self.by = by

    def run(self, job: object, cases: list[KernelCase]) -> list[list[Answer]]:
        answers = []
        for case in cases:
            alone = run_rank(case, 0, 1, None)
            answers.append(([t + self.by for t in alone], alone))
        return [answers]


def test_the_check_can_fail() -> None:
    case = {"causal": low(Case("ring", 32), "reference", "cpu")}
    assert check(Bent(0.0), case) == []
    with pytest.raises(AssertionError, match=r"causal: out: .*\n.*causal: lse: "):
        check(Bent(0.3), case)
