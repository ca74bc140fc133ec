"""Results are the same to the bit whoever is late, and kernels are told to make them so."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from customized_ops.ring_attention.core.comm import Comm

from .numerics_cases import PLANS, Rounding, draw, over_plans, run


@pytest.mark.covering(1)
@over_plans
@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16])
def test_whoever_is_late_results_are_the_same_to_the_bit(
    name: str, reduce_dtype: torch.dtype | None
) -> None:
    plan, tensors = PLANS[name], draw(PLANS[name].mask, torch.float32)
    options = {"deterministic": True, "reduce_dtype": reduce_dtype}

    def late(seed: int) -> Callable[[Comm], None]:
        def begin(comm: Comm) -> None:
            chance, start = random.Random(seed * 100 + comm.rank), comm.start

            def slow(send: Any, receive: Any) -> Callable[[], None]:
                time.sleep(chance.random() / 500)
                return start(send, receive)

            comm.start = slow  # type: ignore[method-assign]

        return begin

    first, _ = run(plan, tensors, begin=late(0), **options)
    for seed in range(1, 4):
        again, _ = run(plan, tensors, begin=late(seed), **options)
        assert all(map(torch.equal, first, again))


@pytest.mark.covering(1)
@over_plans
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_call_of_the_kernel_is_told(name: str, deterministic: bool) -> None:
    told: list[bool] = []

    class Asked(Rounding):
        @staticmethod
        def backward(*given: Any, **options: Any) -> tuple[Tensor, ...]:
            told.append(options["deterministic"])
            return Rounding.backward(*given, **options)

    tensors = draw(PLANS[name].mask, torch.float32)
    run(PLANS[name], tensors, Asked, deterministic=deterministic)
    assert set(told) == {deterministic} and len(told) >= 4
