"""Cases of the functions of ring_swa, and how a rank calls one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from op_cases import Case
from torch import Tensor

from customized_ops.ring_attention.api import ring_swa
from customized_ops.ring_attention.core.comm.comm_groups import comm_by_name, group_name

FUNCTIONS = {
    "window": ring_swa.ring_sliding_window_attn,
    "packed window": ring_swa.ring_sliding_window_attn_varlen,
    "streaming": ring_swa.ring_streaming_llm_attn,
    "packed streaming": ring_swa.ring_streaming_llm_attn_varlen,
}


@dataclass(frozen=True)
class SwaCase(Case):
    """``op`` says which function is called, and what is right.

    Attributes:
        told: whether the call names the ranks of the ring, as ring_swa's examples do.
    """

    told: bool = False

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None, **where: Any
    ) -> Any:
        """out and lse."""
        assert sink is None
        group = where["process_group"]
        cu = [torch.tensor(self.cu_seqlens, device=self.device)] if self.packed else []
        options: dict[str, Any] = {"return_lse": True, "layout": where.get("layout")}
        if "streaming" in self.op and self.sink_tokens != 1:
            options["sink_tokens"] = self.sink_tokens
        if self.told:
            options |= ring_of(group)
        return FUNCTIONS[self.op](q, k, v, self.window[0], *cu, group, **options)


def ring_of(group: Any) -> dict[str, int]:
    """The ranks of the ring, as callers work them out for themselves."""
    comm = comm_by_name(group_name(group))
    ranks = list(range(comm.size))
    if isinstance(group, dist.ProcessGroup):
        ranks = [dist.get_global_rank(group, n) for n in ranks]
    elif isinstance(group, list):
        ranks = group
    return {
        "cp_size": comm.size,
        "cp_local_rank": comm.rank,
        "cp_prev_global_rank": ranks[(comm.rank - 1) % comm.size],
        "cp_next_global_rank": ranks[(comm.rank + 1) % comm.size],
    }
