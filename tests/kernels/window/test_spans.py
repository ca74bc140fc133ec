"""Where the calls' parts lie, and what they add up to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from customized_ops.ring_attention.core.kernels.window.spans import Gradient, Spans

LENGTH = 12
ranges = st.lists(
    st.tuples(st.integers(0, LENGTH - 1), st.integers(1, LENGTH)).map(
        lambda x: (x[0], min(LENGTH, x[0] + x[1]))
    ),
    max_size=6,
)


@given(ranges)
@settings(deadline=None, derandomize=True, max_examples=200)
def test_what_is_said_of_ranges(parts: list[tuple[int, int]]) -> None:
    spans = Spans.of(parts, LENGTH)
    sets = [set(range(*part)) for part in parts]
    assert spans.whole == (parts == [(0, LENGTH)])
    assert list(spans.fresh) == [not any(a & b for b in sets[:n]) for n, a in enumerate(sets)]
    written = set().union(*(a for a, fresh in zip(sets, spans.fresh, strict=True) if fresh))
    outside = [token for start, stop in spans.outside for token in range(start, stop)]
    assert outside == sorted(set(range(LENGTH)) - written)
    assert spans.most == max(sum(token in a for a in sets) for token in range(LENGTH))


@given(ranges)
@settings(deadline=None, derandomize=True, max_examples=100)
def test_gradients_add_up(parts: list[tuple[int, int]]) -> None:
    """As of an fp32 tensor, rounded once: in the inputs' dtype only where that is the same."""
    source = torch.Generator().manual_seed(len(parts))
    like = torch.zeros(1, LENGTH, 2, 4, dtype=torch.bfloat16)
    spans = Spans.of(parts, LENGTH)
    gradient, want = Gradient(like, spans), torch.zeros(like.shape)
    for n, (start, stop) in enumerate(parts):
        part = torch.randn((1, stop - start, 2, 4), generator=source).bfloat16()
        gradient.add(n, part, gradient.total[:, start:stop])
        want[:, start:stop] += part
    assert gradient.total.dtype == (torch.bfloat16 if spans.most <= 2 else torch.float32)
    assert torch.equal(gradient.total.bfloat16(), want.bfloat16())


@pytest.mark.parametrize("cut", [False, True])
def test_one_part_of_everything_is_kept_as_it_is(cut: bool) -> None:
    """Unless it comes in batch entries."""
    part, like = torch.ones(1, 3, 1, 8), torch.zeros(1, 3, 1, 8)
    gradient = Gradient(like, replace(Spans.of([(0, 3)], 3), whole=not cut))
    gradient.add(0, part, gradient.total)
    assert (gradient.total is part) != cut and torch.equal(gradient.total, part)
