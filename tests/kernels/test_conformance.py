"""Every kernel that this machine has, on every case, against dense attention in fp64."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch

from customized_ops.ring_attention import AttnMask
from customized_ops.ring_attention.core.kernels import (
    KERNELS,
    Kernel,
    KernelError,
    Pairs,
    choose,
    refusal,
)

from .cases import Case, Inputs, cases, inputs
from .conformance import LSE_SHARE, assert_near, attempt, checks, judge, no_waiting, run
from .masks import MASKS
from .textbook import textbook, truth

MOST_CONFIGURATIONS = 25  # a kernel that compiles takes 5 to 10 s for each
BEYOND = 600_000  # tokens: x 32 heads x 128 is more than 2^31 elements
TAIL = 300  # of its rows are compared
TAIL_CASE = Case(1024, "window back", heads=(32, 4))


def on_device(device: str, *values: object, id: str) -> object:
    marks = [pytest.mark.gpu] if device == "cuda" else []
    return pytest.param(*values, device, marks=marks, id=f"{device}-{id}")


def grouped(device: str) -> dict[str, list[Case]]:
    """The cases by configuration."""
    groups = defaultdict(list)
    for case in cases(device):
        groups[case.configuration].append(case)
    return groups


KERNELS_BY_DEVICE = [
    (kernel, able.device) for kernel in KERNELS.values() for able in kernel.CAPABILITIES
]
over_kernels = pytest.mark.parametrize(
    ("kernel", "device"),
    [on_device(device, kernel, id=kernel.NAME) for kernel, device in KERNELS_BY_DEVICE],
)


@pytest.mark.thin(16)
@pytest.mark.parametrize(
    ("kernel", "group", "device"),
    [
        on_device(device, kernel, group, id=f"{kernel.NAME}-{configuration}")
        for kernel, device in KERNELS_BY_DEVICE
        for configuration, group in grouped(device).items()
    ],
)
def test_conforms(kernel: Kernel, group: list[Case], device: str) -> None:
    """Cases of one configuration together, so that it is compiled by one process."""
    wrong = []
    for case in group:
        request = case.request(device)
        if refusal(kernel, request) is not None:
            with pytest.raises(KernelError, match=f"kernel '{kernel.NAME}' cannot do this"):
                choose("test", kernel.NAME, request)
            continue
        for name, check in checks(case).items():
            _, text = attempt(check, kernel, case, device)
            wrong += [f"{case}: {name}: {text}"] if text else []
    assert not wrong, "\n".join(wrong)


@over_kernels
def test_takes_the_base_or_is_missing(kernel: Kernel, device: str) -> None:
    """Prints, for ``pytest -rP``, what the kernel refuses and why."""
    why = {case: refusal(kernel, case.request(device)) for case in cases(device)}
    refused = {case: reason for case, reason in why.items() if reason is not None}
    print(f"{kernel.NAME} on {device}: runs {len(why) - len(refused)} of {len(why)} cases")
    for case, reason in refused.items():
        print(f"  refuses {case}: {reason}")
    if kernel.NAME == "reference":
        assert not refused
    base = Case(cases(device)[0].tokens)
    if kernel.missing() is not None:
        assert len(refused) == len(why)
    elif base in refused:
        assert "compute capability" in refused[base]


def test_configurations_are_few() -> None:
    for device in ("cpu", "cuda"):
        assert len(grouped(device)) <= MOST_CONFIGURATIONS


def test_draws_reach_every_axis() -> None:
    assert {case.mask for case in cases("cuda")} == set(MASKS)
    base, odd = sorted({case.tokens for case in cases("cuda")})
    mixed = [
        c for c in cases("cuda") if c.tokens == odd and c.strides != "dense" and c.mask != "causal"
    ]
    assert base % 64 == 0 and odd % 2 == 1 and mixed


@pytest.mark.gpu
def test_beyond_two_to_the_31_elements() -> None:
    """The last rows of a sequence whose tensors 32-bit indices do not reach. One kernel after the
    other, because each needs tens of GiB."""
    free, _ = torch.cuda.mem_get_info()
    if free < 60 * 2**30:
        pytest.skip(f"needs 60 GiB of free GPU memory, has {free / 2**30:.0f}")
    # The reference takes rows in blocks that shrink as keys grow: hours.
    others = [kernel for kernel in KERNELS.values() if kernel.NAME != "reference"]
    tried = {k.NAME: attempt(check_tail, k, TAIL_CASE, "cuda") for k in others if claims_large(k)}
    wrong = [f"{name}: {text}" for name, (_, text) in tried.items() if text]
    assert not wrong, "\n".join(wrong)
    assert "torch" in tried and all(ratio > 0 for ratio, _ in tried.values())


def claims_large(kernel: Kernel) -> bool:
    """Whether a kernel that runs here says it can do this."""
    able = [can for can in kernel.CAPABILITIES if can.device == "cuda"]
    large = any("64-bit indices" in can.features for can in able)
    return large and kernel.missing() is None


def check_tail(kernel: Kernel, case: Case, device: str, tokens: int = BEYOND) -> float:
    """The last TAIL rows see the last keys only, which is the case; and the last TAIL keys are seen
    by those rows only."""
    request = case.request(device)
    features = (*request.features, "64-bit indices")
    if refusal(kernel, replace(request, tokens=tokens, features=features)) is not None:
        return 0.0
    source = torch.Generator(device).manual_seed(0)
    (h, g), (d, e) = case.heads, case.dims
    q, k, v, dout = (
        torch.randn(1, tokens, *size, generator=source, device=device, dtype=case.dtype)
        for size in ((h, d), (g, d), (g, e), (h, e))
    )
    mask = AttnMask.dense(tokens, window=(case.tokens // 8, 0))
    pairs = Pairs(mask.slices, tokens, tokens)
    whole = Inputs(q, k, v, dout, None, None)
    end = Inputs(*(t[:, -case.tokens :].clone() for t in (q, k, v, dout)), None, None)
    got = run(kernel, case, whole, pairs)
    want, plain = truth(case, end), textbook(case, end)
    ratios = []
    for name in want:
        dim = 2 if name == "lse" else 1
        last = (
            t.narrow(dim, t.shape[dim] - TAIL, TAIL) for t in (got[name], want[name], plain[name])
        )
        ratios.append(assert_near(name, *last, case.dtype))
    return max(ratios)


def test_the_tail_of_a_long_sequence_is_a_case_of_its_own() -> None:
    """What the GPU test does, with few tokens."""
    assert (
        check_tail(KERNELS["reference"], replace(TAIL_CASE, tokens=512, heads=(4, 2)), "cpu", 700)
        < 1
    )


JUDGED = Case(200, heads=(4, 2), dims=(64, 64))


@pytest.fixture(scope="module")
def judged() -> tuple[Inputs, Any, Any]:
    """Inputs, what is true of them, and what passes."""
    given = inputs(JUDGED, "cpu", 0)
    want, plain = truth(JUDGED, given), textbook(JUDGED, given)
    assert judge(JUDGED, given, plain) <= 1
    return given, want, plain


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
@pytest.mark.parametrize("way", ["everywhere", "one value", "NaN", "a tile"])
def test_the_judge_can_fail(name: str, way: str, judged: tuple[Inputs, Any, Any]) -> None:
    case, (given, want, plain) = JUDGED, judged
    got = {n: t.clone(memory_format=torch.contiguous_format) for n, t in plain.items()}
    eps = torch.finfo(case.dtype).eps
    largest = LSE_SHARE if name == "lse" else want[name].abs().max().item()
    if name in ("dk", "dv"):
        largest *= 2
    tolerance = 2 * (plain[name] - want[name]).abs().max().item() + eps * largest
    sign = torch.where(plain[name] < 0, -1.0, 1.0)
    if way == "everywhere":
        got[name] += 3 * tolerance * sign
    elif way == "one value":
        got[name].flatten()[7] += 3 * tolerance
    elif way == "NaN":
        got[name].flatten()[7] = torch.nan
    else:  # as small as the late rows of a causal mask are, which the worst value hides
        dim = 2 if name == "lse" else 1
        got[name].narrow(dim, 96, 64).mul_(0.9)
    with pytest.raises(AssertionError, match=name):
        judge(case, given, got)


def test_the_judge_sees_what_should_be_zero() -> None:
    case = Case(160, "rows without keys", heads=(4, 2), dims=(64, 64))
    given = inputs(case, "cpu", 0)
    got = textbook(case, given)
    assert judge(case, given, got) <= 1
    got["out"][:, 0] = 1e-6
    with pytest.raises(AssertionError, match="out: not 0 where nothing attends"):
        judge(case, given, got)


def test_a_failing_check_is_told() -> None:
    def broken(kernel: Kernel, case: Case, device: str) -> float:
        raise RuntimeError("boom")

    assert attempt(broken, KERNELS["reference"], TAIL_CASE, "cpu") == (
        torch.inf,
        "RuntimeError: boom",
    )


def test_a_kernel_that_differs_from_run_to_run_is_told() -> None:
    class Drifting:
        NAME = "drifting"
        calls = 0

        def forward(self, *args: Any) -> Any:
            self.calls += 1
            out, lse = KERNELS["reference"].forward(*args)
            return out * (1 + self.calls * 2**-6), lse

        backward = staticmethod(KERNELS["reference"].backward)

    with pytest.raises(AssertionError, match="out differs from run to run"):
        checks(Case(64))["repeats"](Drifting(), Case(64), "cpu")  # type: ignore[arg-type]


@pytest.mark.gpu
def test_waiting_is_told() -> None:
    with pytest.raises(RuntimeError, match="synchroniz"), no_waiting("cuda"):
        torch.ones(1, device="cuda").item()
    torch.ones(1, device="cuda").item()
