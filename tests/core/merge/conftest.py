"""Tests of kernels of rows."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from customized_ops.ring_attention.core.merge import rows as fused

from .row_cases import INTERPRETED


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module that launches; with ``count`` of what it has launched. Where kernels are
    interpreted it is used on the CPU too, outside :func:`by_torch`."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    from customized_ops.ring_attention.core.merge import launch

    def counted(*args: Any) -> None:
        launch.count += 1
        launch_once(*args)

    launch_once = launch._launch
    monkeypatch.setattr(launch, "count", 0, raising=False)
    monkeypatch.setattr(launch, "off", False, raising=False)
    monkeypatch.setattr(launch, "_launch", counted)
    if INTERPRETED:
        merge_module = importlib.import_module("customized_ops.ring_attention.core.merge.merge")

        def choose(*tensors: torch.Tensor) -> ModuleType | None:
            rows = all(t.dim() == 4 for t in tensors)
            return launch if rows and not launch.off and launch.fits(*tensors) else None

        monkeypatch.setattr(fused, "on_gpu", choose)
        monkeypatch.setattr(merge_module, "on_gpu", choose)
    yield launch
