"""What masks and documents of tests are made of, and plans by other costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import numpy as np

from customized_ops.ring_attention import Plan, make_plan
from customized_ops.ring_attention.core.cost import H200, CostModel
from customized_ops.ring_attention.op import call


def cumulative(lengths: list[int]) -> list[int]:
    return np.cumsum([0, *lengths]).tolist()


# What a step costs decides which plan the op takes; sequences this short take the simplest one.
COSTS = {
    "as they are": H200,
    "links are slow": CostModel(link_bytes=1.0, step_seconds=0.0),
    "kernels are slow": CostModel(forward_flops=1.0, backward_flops=1.0),
}


@contextmanager
def planned_for(costs: CostModel) -> Iterator[Callable[..., Plan]]:
    """The ops plan by ``costs``; gives the function that they plan with."""
    plan = partial(make_plan, costs=costs)
    with patch.object(call, "make_plan", plan):
        yield plan
