"""The kernel "torch": what torch itself has, another on each type of device."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from ..pairs import Pairs
from ..scoring import Scoring, Tokens
from . import torch_flash, torch_sdpa

NAME = "torch"
CAPABILITIES = (torch_flash.CAPABILITIES, torch_sdpa.CAPABILITIES)


def missing() -> str | None:
    """See :class:`~.protocol.Kernel`."""
    return None


def forward(
    q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, scoring: Scoring, tokens: Tokens | None
) -> tuple[Tensor, Tensor]:
    """See :class:`~.protocol.Kernel`."""
    return _on(q).forward(q, k, v, pairs, scoring, tokens)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pairs: Pairs,
    scoring: Scoring,
    tokens: Tokens | None,
    *,
    dlse: Tensor | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :class:`~.protocol.Kernel`."""
    return _on(q).backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        pairs,
        scoring,
        tokens,
        dlse=dlse,
        deterministic=deterministic,
    )


def _on(q: Tensor) -> ModuleType:
    """What torch has on the device of ``q``."""
    return torch_flash if q.device.type == "cuda" else torch_sdpa
