"""What a plan should take, to choose between plans.

A rank's time is its pairs at the kernel's rate and its bytes at the link's. Only the order of plans
matters here, so the constants need to be right within a factor of two or so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from .plan import Plan

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CostModel:
    """Rates of one device and its links.

    The defaults were measured on two H200s over NVLink in bf16 with 32 query and 8 key heads of 128
    (flash-attn-4, causal, 32k tokens; NCCL send and receive).

    Attributes:
        forward_flops, backward_flops: floating-point operations a second of the kernel; backward
            does 2.5 times as many.
        link_bytes: bytes a second that a rank sends, and as many that it receives meanwhile.
        step_seconds: time before the first byte of an exchange arrives.
    """

    forward_flops: float = 650e12
    backward_flops: float = 590e12
    link_bytes: float = 300e9
    step_seconds: float = 20e-6

    def compute_seconds(self, plan: Plan, q_heads: int, head_dim: int, v_dim: int) -> Seconds:
        """float64[P]: each rank's time in kernels, forward and backward, batch 1."""
        flops = 2.0 * plan.area * (q_heads / plan.team_size) * (head_dim + v_dim)
        return flops / self.forward_flops + 2.5 * flops / self.backward_flops

    def link_seconds(
        self, plan: Plan, q_heads: int, kv_heads: int, head_dim: int, v_dim: int, itemsize: int
    ) -> Seconds:
        """float64[P]: each rank's time on its links, forward and backward, batch 1."""
        sizes = (q_heads, kv_heads, head_dim, v_dim, itemsize)
        both = plan.forward_bytes(*sizes) + plan.backward_bytes(*sizes)
        # Forward: rows and keys at once, results home. Backward: rows and keys, then both home.
        steps = 2 * (plan.kv_tokens().any(axis=1) | plan.q_tokens().any(axis=1))
        steps = steps + 2 * plan.q_tokens().any(axis=1)
        return both.max(axis=1) / self.link_bytes + steps * self.step_seconds

    def step_total(
        self,
        plan: Plan,
        q_heads: int,
        kv_heads: int,
        head_dim: int = 128,
        v_dim: int | None = None,
        itemsize: int = 2,
    ) -> float:
        """Seconds of one forward and backward, batch 1: that of the slowest rank in computing and
        of the busiest link; they overlap where the plan works in stages."""
        v_dim = head_dim if v_dim is None else v_dim
        compute = self.compute_seconds(plan, q_heads, head_dim, v_dim).max()
        link = self.link_seconds(plan, q_heads, kv_heads, head_dim, v_dim, itemsize).max()
        return float(compute + link if plan.gathered else max(compute, link))


H200 = CostModel()
