"""flash-linear-attention's own kernels in Triton's interpreter, on a CPU, in fp32: the adapters,
over ranks too, against the definitions. It takes minutes, and needs triton and the library:

    TRITON_INTERPRET=1 pytest tests/linear_attention/test_interpreted.py
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conv_cases import ConvCase
from linear_cases import LinearCase
from torch import Tensor

from customized_ops.along_sequence.packed_sequences import CHUNK, packed_sequences
from customized_ops.causal_conv1d.kernels import fla as of_convolution
from customized_ops.linear_attention.kernels import fla

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1"
    or not all(map(importlib.util.find_spec, ("triton", "fla"))),
    reason="runs with TRITON_INTERPRET=1, where triton and flash-linear-attention are installed",
)
KINDS = {"delta": (True, False), "kda": (True, True), "gates": (False, False), "gla": (False, True)}
LINEAR = LinearCase(150, heads=(1, 2), dims=(16, 16), decay=0.1, kernel="fla", dtype=torch.float32)
PACKED = replace(LINEAR, batch=1, lengths=(1, 70, 0, 40, 30))
LIMIT = 1e-5  # of the norm


class Driver:
    """Of a GPU that the library takes for an H100, whose kernels run on the CPU."""

    get_current_device = get_current_stream = staticmethod(lambda *_: 0)
    get_active_torch_device = staticmethod(lambda: torch.device("cpu"))
    get_device_interface = staticmethod(lambda: torch.cpu)
    get_benchmarker = staticmethod(lambda: lambda *_, **__: [1.0] * 3)
    utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": 232_448})

    @staticmethod
    def get_current_target() -> Any:
        """Compute capability 9.0."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.fixture(autouse=True, scope="module")
def _h100() -> Iterator[None]:
    """In place before the library is imported, which looks at the GPU."""
    from triton.runtime import driver, interpreter

    has = {"name": "NVIDIA H100", "multi_processor_count": 132, "major": 9, "minor": 0}
    has["shared_memory_per_block_optin"] = 232_448
    given: dict[str, Any] = {
        "get_device_name": lambda *_: has["name"],
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: SimpleNamespace(**has),
        "device": lambda *_: contextlib.nullcontext(),
        "current_device": lambda: 0,
    }
    run, alone = interpreter.GridExecutor.__call__, threading.RLock()

    def one_at_a_time(*args: Any, **options: Any) -> None:
        with alone:  # ranks are threads, the interpreter has one state
            run(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            patch.setattr(torch.cuda, name, value)
        patch.setenv("FLA_CACHE_RESULTS", "0")
        patch.setattr(interpreter.GridExecutor, "__call__", one_at_a_time)
        for adapter in (fla, of_convolution):
            patch.setattr(adapter, "refuses", lambda x: None)
        driver.set_active(Driver())
        yield


def check(names: Sequence[str], found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    off = {}
    for name, x, y in zip(names, found, expected, strict=True):
        off[name] = ((x - y).norm() / y.norm()).item()
    assert all(each <= LIMIT for each in off.values()), off  # no NaN, either


@pytest.mark.parametrize(("layout", "ranks"), [("contiguous", 1), ("uneven", 3), ("zigzag", 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_linear_attention(kind: str, layout: str, ranks: int) -> None:
    delta, channels = KINDS[kind]
    assert fla.steps_known(), "the version whose parts are called"
    for case in (LINEAR, PACKED):
        case = replace(case, delta=delta, channels=channels, layout=layout)
        names = ["out", *["final"] * case.final, *case.given]
        check(names, case.in_process(ranks), case.expected())


@pytest.mark.parametrize(("layout", "ranks"), [("contiguous", 1), ("zigzag", 3)])
@pytest.mark.parametrize("lengths", [None, (1, 70, 0, 2, 40, 37)])
def test_convolution(lengths: tuple[int, ...] | None, layout: str, ranks: int) -> None:
    batch = 2 if lengths is None else 1
    case = ConvCase(150, batch, 10, lengths=lengths, layout=layout, dtype=torch.float32)
    case = replace(case, activation="silu", kernel="fla")
    check(["y", *case.given], case.in_process(ranks), case.expected())


@pytest.mark.parametrize("ends", [(0, 700, 701, 1001, 2048), (0, 64, 128), (0, 3, 5)])
def test_chunks_are_those_of_the_library(ends: tuple[int, ...]) -> None:
    from fla.ops.utils import prepare_chunk_indices

    packed = packed_sequences(np.array(ends), 2)
    assert packed is not None
    given = packed.on(torch.device("cpu"))
    assert torch.equal(prepare_chunk_indices(given["cu_seqlens"], CHUNK), given["chunk_indices"])
