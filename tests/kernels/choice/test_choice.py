"""Which kernel takes a request, by what it can do and by what was measured."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from unittest import TestCase

import pytest
import torch

from customized_ops.ring_attention.core.kernels import (
    KERNELS,
    Capabilities,
    KernelError,
    Request,
    choice,
    choose,
)
from customized_ops.ring_attention.core.kernels.adapters import torch_sdpa
from customized_ops.ring_attention.core.kernels.speeds import SPEEDS

from .choice_cases import CPU, GPU

DTYPES = "torch.float64, torch.float32, torch.bfloat16, torch.float16"
NOT_ALL_GPUS = ("flash3", "cudnn_flex")


TORCH = SimpleNamespace(NAME="torch", CAPABILITIES=(torch_sdpa.CAPABILITIES,), missing=lambda: None)


class Probe(SimpleNamespace):
    """A kernel for GPUs that counts how often it is asked what is missing."""

    def __init__(self, name: str, problem: str | None = None, **able: object) -> None:
        half = (torch.bfloat16, torch.float16)
        cuda = Capabilities("cuda", **{"dtypes": half, "features": ("window",), **able})
        super().__init__(NAME=name, CAPABILITIES=(cuda,), problem=problem, asked=0)

    def missing(self) -> str | None:
        self.asked += 1
        return self.problem


@pytest.fixture(autouse=True)
def nothing_chosen() -> Iterator[None]:
    choice._chosen.cache_clear()
    yield
    choice._chosen.cache_clear()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Probe]:
    """GPU kernels beside one for CPU, and the reference."""
    probes = {name: Probe(name) for name in ("flash4", "unmeasured", "cudnn", "flex")}
    on_cpu = {"torch": TORCH, "reference": KERNELS["reference"]}
    monkeypatch.setattr(choice, "KERNELS", {**probes, **on_cpu})
    return probes


def test_auto_takes_the_fastest_as_measured(kernels: dict[str, Probe]) -> None:
    assert choose("an_op", "auto", GPU) is kernels["flash4"]
    kernels["flash4"].problem = "flash_attn.cute is not installed"
    choice._chosen.cache_clear()
    assert choose("an_op", "auto", GPU) is kernels["unmeasured"]
    kernels["unmeasured"].problem = "too old"
    choice._chosen.cache_clear()
    assert choose("an_op", "auto", GPU) is kernels["cudnn"]
    kernels["cudnn"].problem = "too old"
    choice._chosen.cache_clear()
    assert choose("an_op", "auto", GPU) is kernels["flex"]
    kernels["unmeasured"].problem = None
    # Nobody was measured in fp32, so the order of the registry decides.
    for probe in kernels.values():
        probe.CAPABILITIES = (replace(probe.CAPABILITIES[0], dtypes=(torch.float32,)),)
    assert choose("an_op", "auto", replace(GPU, dtype=torch.float32)) is kernels["unmeasured"]


def test_a_warning_says_why_the_reference_is_taken(kernels: dict[str, Probe]) -> None:
    kernels["flash4"].CAPABILITIES = Probe("flash4", features=()).CAPABILITIES
    for name in ("unmeasured", "cudnn", "flex"):
        kernels[name].problem = "lacks a library"
    with pytest.warns(UserWarning, match="auto takes the slow reference") as said:
        assert choose("an_op", "auto", replace(GPU, features=("window",))) is KERNELS["reference"]
    assert str(said[0].message).endswith(
        " (flash4: has no window; torch: runs on cpu, not cuda; unmeasured, cudnn, flex: lacks a "
        "library)"
    )
    with pytest.raises(KernelError, match=r"cannot do this \(lacks a library\)"):
        choose("an_op", "cudnn", GPU)


def test_on_cpu_no_kernel_for_gpus_is_asked(kernels: dict[str, Probe]) -> None:
    assert choose("an_op", "auto", CPU) is TORCH
    assert choose("an_op", "torch", CPU) is TORCH
    assert choose("an_op", "reference", CPU) is KERNELS["reference"]
    for features, kernel in {("alibi",): "torch", ("softcap",): "reference"}.items():
        assert kernel == choose("an_op", "auto", replace(CPU, features=features)).NAME
    assert all(probe.asked == 0 for probe in kernels.values())


def test_a_choice_is_made_once(kernels: dict[str, Probe]) -> None:
    for op in ("an_op", "another_op"):
        assert choose(op, "auto", GPU) is kernels["flash4"]
    choose("an_op", "cudnn", GPU)
    # No library is imported only to be found slower.
    assert {name: probe.asked for name, probe in kernels.items()} == {
        "flash4": 1,
        "unmeasured": 0,
        "cudnn": 1,
        "flex": 0,
    }


def test_what_was_taken_is_said_once(kernels: dict[str, Probe]) -> None:
    kernels["flash4"].problem = "flash_attn.cute is not installed"
    with TestCase().assertLogs("seqshard", logging.INFO) as logged:
        for op in ("an_op", "another_op"):
            choose(op, "auto", GPU)
        choose("an_op", "flex", GPU)
        kernels["cudnn"].problem = "lacks a library"
        kernels["unmeasured"].problem = "lacks a library"
        choose("an_op", "auto", replace(GPU, shape_class="packed"))
        choose("an_op", "auto", CPU)
    what = (
        "causal attention of about 32768 tokens, 32:8 heads of dims 128 and 128, torch.bfloat16 "
        "on cuda: "
    )
    assert [record.getMessage() for record in logged.records] == [
        f"{what}kernel unmeasured (torch: runs on cpu, not cuda; flash4: flash_attn.cute is not "
        "installed; cudnn, flex: later in the order; reference: slower)",
        f"{what}kernel flex, as asked for",
        f"{what.replace('causal', 'packed')}kernel flex (torch: runs on cpu, not cuda; flash4: "
        "flash_attn.cute is not installed; unmeasured, cudnn: lacks a library; reference: slower)",
        "causal attention of about 0 tokens, 32:8 heads of dims 128 and 128, torch.bfloat16 on "
        "cpu: kernel torch (flash4, unmeasured, cudnn, flex: runs on cuda, not cpu; reference: "
        "slower)",
    ]


def test_what_was_measured_slower_is_said_so(kernels: dict[str, Probe]) -> None:
    with TestCase().assertLogs("seqshard", logging.INFO) as logged:
        choose("an_op", "auto", GPU)
    said = "unmeasured: later in the order; cudnn, flex: no faster, as measured on H200 and H100; "
    assert said in logged.output[0]


@pytest.mark.parametrize(
    ("major", "able"), [(8, ()), (9, NOT_ALL_GPUS), (10, ("cudnn_flex",)), (12, ())]
)
def test_gpus_that_a_library_has_no_kernels_for(
    monkeypatch: pytest.MonkeyPatch, major: int, able: tuple[str, ...]
) -> None:
    """Newer ones than it knows, too."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    for name in NOT_ALL_GPUS:
        reason = KERNELS[name].CAPABILITIES[0].refuses(replace(GPU, features=()))
        assert (reason is None) == (name in able)
        assert reason is None or reason.endswith(f", not {major}.0")


def test_threads_choose_once(kernels: dict[str, Probe], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels["flash4"], "missing", lambda: time.sleep(0.05))
    logs = TestCase().assertLogs("seqshard", logging.INFO)
    with logs as logged, ThreadPoolExecutor(4) as threads:
        chosen = list(threads.map(lambda op: choose(op, "auto", GPU), "abcd"))
    assert chosen == [kernels["flash4"]] * 4
    assert len(logged.records) == 1


def test_nothing_but_the_reference_on_a_gpu_is_a_warning(kernels: dict[str, Probe]) -> None:
    request = replace(GPU, dtype=torch.float64)
    with pytest.warns(UserWarning, match="auto takes the slow reference") as said:
        for _ in range(3):
            assert choose("an_op", "auto", request) is KERNELS["reference"]
    assert len(said) == 1
    assert str(said[0].message).endswith(
        "torch.float64 on cuda: auto takes the slow reference (flash4, unmeasured, cudnn, flex: "
        "takes torch.bfloat16, torch.float16, not torch.float64; torch: runs on cpu, not cuda)"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose("an_op", "reference", request)
        choose("an_op", "auto", replace(CPU, features=("softcap",)))


@pytest.mark.parametrize(
    ("name", "request_", "message"),
    [
        (
            "fast",
            CPU,
            "kernel 'fast' is unknown; known: auto, flash4, unmeasured, cudnn, flex, torch, "
            "reference",
        ),
        (
            "flash4",
            CPU,
            "kernel 'flash4' cannot do this (runs on cuda, not cpu); able: torch, reference",
        ),
        (
            "torch",
            replace(CPU, features=("softcap", "dropout")),
            "kernel 'torch' cannot do this (has no softcap, dropout); able: reference",
        ),
        (
            "unmeasured",
            replace(GPU, features=("softcap",)),
            "kernel 'unmeasured' cannot do this (has no softcap); able: reference",
        ),
        (
            "torch",
            replace(GPU, shape_class="window"),
            "kernel 'torch' cannot do this (runs on cpu, not cuda); able: flash4, unmeasured, "
            "cudnn, flex, reference",
        ),
        (
            "auto",
            replace(CPU, dtype=torch.int32),
            "no kernel can do this (flash4, unmeasured, cudnn, flex: runs on cuda, not cpu; "
            f"torch, reference: takes {DTYPES}, not torch.int32)",
        ),
    ],
)
@pytest.mark.usefixtures("kernels")
def test_errors(name: str, request_: Request, message: str) -> None:
    for _ in range(2):
        with pytest.raises(KernelError) as info:
            choose("an_op", name, request_)
        assert str(info.value) == f"an_op: {message}"
        assert isinstance(info.value, ValueError)


def test_kernels_are_listed_under_their_names() -> None:
    assert set(SPEEDS) <= set(KERNELS)
    assert [kernel.NAME for kernel in KERNELS.values()] == list(KERNELS)
    for kernel in KERNELS.values():
        devices = [able.device for able in kernel.CAPABILITIES]
        assert devices and len(set(devices)) == len(devices)
