"""The kernel "torch": torch's own attention, a different one on each type of device."""

from __future__ import annotations

from typing import Any

from ..protocol.kernel import BackwardOperands, ForwardOperands, Grads, OutLse
from . import torch_flash, torch_sdpa

NAME = "torch"
CAPABILITIES = (torch_flash.CAPABILITIES, torch_sdpa.CAPABILITIES)
tables = torch_flash.tables


def missing() -> str | None:
    return None


def forward(given: ForwardOperands, *rest: Any) -> OutLse:
    on_device = torch_flash if given.q.device.type == "cuda" else torch_sdpa
    return on_device.forward(given, *rest)


def backward(given: BackwardOperands, *rest: Any, deterministic: bool = False) -> Grads:
    on_device = torch_flash if given.q.device.type == "cuda" else torch_sdpa
    return on_device.backward(given, *rest, deterministic=deterministic)
