"""Small tensors, and what ranks say."""

from __future__ import annotations

from typing import Any

import torch

from customized_ops.ring_attention import wrap_masked_attn_func
from customized_ops.ring_attention.core.comm.inprocess import run_ranks

Q, K = torch.zeros(2, 8, 4, 16), torch.zeros(2, 8, 2, 16)
PQ, PK = torch.zeros(8, 4, 16), torch.zeros(8, 2, 16)


def said_by_ranks(ranks: int, call: Any) -> list[str]:
    """What each of ``ranks`` in-process ranks says to ``call(comm)``."""

    def body(comm: Any) -> str:
        try:
            call(comm)
        except (ValueError, NotImplementedError) as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    return run_ranks(ranks, body)


def masked(q: torch.Tensor, k: torch.Tensor, mask: Any, **options: Any) -> None:
    wrap_masked_attn_func(q, k, k, mask, **options)
