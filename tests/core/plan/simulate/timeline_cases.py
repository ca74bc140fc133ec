"""A cost model in round figures."""

from __future__ import annotations

import numpy as np

from customized_ops.ring_attention.core.cost import CostModel

# A pair of one head of 100 takes 0.4 ns, a key 0.4 us inside a host and 4 us between hosts.
ROUND = CostModel(
    forward_flops=1e12,
    backward_flops=0.5e12,
    link_bytes=1e9,
    step_seconds=1e-6,
    call_seconds=0.0,
    between_bytes=0.1e9,
    between_seconds=5e-6,
    memory_bytes=np.inf,
)
