"""Lengths that are rounded up to few numbers."""

from __future__ import annotations

import pytest

from customized_ops.ring_attention.core.rounding import in_steps


@pytest.mark.parametrize("each", [1, 2, 8, 16])
def test_numbers_in_steps_are_few_and_not_much_larger(each: int) -> None:
    numbers = range(1, 5000)
    rounded = [in_steps(n, each) for n in numbers]
    assert all(n <= r < n + max(n / each, 1) for n, r in zip(numbers, rounded, strict=True))
    assert all(in_steps(r, each) == r for r in rounded)
    assert rounded == sorted(rounded) and len(set(rounded)) <= 13 * each + 1
