"""Compiled Triton kernels are launched by what they know, where Triton's launcher is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from customized_ops.ring_attention.core.triton_launch import launch_of


class Launcher:
    """As Triton's of NVIDIA's GPUs."""

    def __init__(self) -> None:
        self.given: tuple[Any, ...] = ()

    def __call__(
        self, gridX: int, gridY: int, gridZ: int, stream: int, function: int, *args: Any
    ) -> None:
        self.given = (gridX, gridY, gridZ, stream, function, *args)


class Compiled(SimpleNamespace):
    """As Triton's compiled kernels."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args: self.launched.append((grid, *args))


@pytest.mark.parametrize("known", [True, False])
def test_a_known_launcher_is_called_at_once(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda n: 70 + n, raising=False)
    launcher: Any = Launcher() if known else SimpleNamespace()
    made = Compiled(run=launcher, function=5, packed_metadata="m", launched=[])
    launch_of(made, 1)((2, 3, 1), 11, 12)
    if known:
        assert launcher.given == (2, 3, 1, 71, 5, "m", None, None, None, 11, 12)
    else:
        assert made.launched == [((2, 3, 1), 11, 12)]
