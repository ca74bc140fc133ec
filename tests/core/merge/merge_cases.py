"""Parts of some of the rows."""

import torch
from hypothesis import strategies as st

LENGTH = 12
RANGES = st.lists(st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)).map(sorted), max_size=5)


def most(ranges) -> int:
    """Parts of the row that has most."""
    return max(sum(start <= n < stop for start, stop in ranges) for n in range(LENGTH))


def ranges_drawn(ranges, dtypes, seed):
    """A part [2, n, 3, 4] and its lse for each range."""
    draw = torch.Generator().manual_seed(seed)
    for (start, stop), dtype in zip(ranges, dtypes, strict=False):
        out = torch.randn(2, stop - start, 3, 4, generator=draw).to(dtype)
        yield slice(start, stop), out, torch.randn(2, 3, stop - start, generator=draw)


def assert_rounded_once(got, want) -> None:
    """``got`` is within half a step of bf16 of ``want``, and what fp32 adds to that."""
    assert got.shape == want.shape and not got.isnan().any()
    half_step = 2.0 ** (torch.frexp(want).exponent - 9)
    error = (got.double() - want).abs()
    assert (error <= half_step + 1e-6).all(), "rounded to bf16 more than once"


def part(value: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((1, 2, 4, 3), value, dtype=dtype)
