"""TransformerEngine's context parallelism, called as its own attention module calls it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmark.cases import Case

from .packages import not_installed

MODULE = "transformer_engine.pytorch.attention.dot_product_attention.context_parallel"


def missing(device: torch.device) -> str | None:
    """Why it does not run here, or None."""
    return not_installed(device, "transformer-engine", MODULE)


def attention(
    group: dist.ProcessGroup, comm_type: str, case: Case, device: torch.device
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention of [1, l, heads, d] laid out zigzag; comm_type: "p2p", "all_gather" or "a2a"."""
    starts = torch.tensor(case.bounds, dtype=torch.int32, device=device)
    longest = max(b - a for a, b in pairwise(case.bounds))
    packed, causal = case.packed, case.causal
    mask = "causal" if causal else "no_mask"
    if packed:
        mask = "padding_causal" if causal else "padding"
    given: dict[str, Any] = {
        "is_training": True,
        "cu_seqlens_q": starts,
        "cu_seqlens_kv": starts,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
        "cu_seqlens_q_padded": starts if packed else None,
        "cu_seqlens_kv_padded": starts if packed else None,
        "dropout_p": 0.0,
        "cp_group": group,
        "cp_global_ranks": dist.get_process_group_ranks(group),
        "cp_stream": torch.cuda.Stream(device),
        "cp_comm_type": comm_type,
        "qkv_format": "thd" if packed else "bshd",
        "attn_mask_type": mask,
        "use_fused_attention": True,
        "window_size": (case.window, 0 if causal else -1),
    }

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own = q, k, v
        if packed:
            own = tuple(t.squeeze(0) for t in own)
        out = import_module(MODULE).attn_forward_func_with_cp(
            q=own[0], k=own[1], v=own[2], softmax_scale=q.shape[-1] ** -0.5, **given
        )
        return out.view(q.shape)

    return attend
