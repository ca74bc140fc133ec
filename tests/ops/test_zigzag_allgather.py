"""Attention of zigzag rows over whole keys: each rank alone computes what one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from customized_ops.ring_attention import (
    Layout,
    run_ranks,
    wrap_maybe_shuffle,
    wrap_maybe_unshuffle,
    wrap_ring_attn_varlen_func,
    wrap_zigzag_allgather_attn_varlen_func,
)
from customized_ops.ring_attention.core.comm import Comm

CU = [0, 16, 16, 24, 64]
CU_K = [0, 20, 23, 31, 80]  # keys of other lengths
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (5, 0)},
    "lse": {"causal": True, "return_lse": True, "softcap": 2.0},
}


def tensors(keys: int = 64) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = (64, 4, 8), (keys, 2, 8), (keys, 2, 6)
    return [torch.randn(s, dtype=torch.float64, generator=g).requires_grad_() for s in shapes]


def weighted(results: Any, layout: Layout | None = None, rank: int = 0) -> Tensor:
    """A scalar of the results; a rank's part of it."""
    total = torch.zeros((), dtype=torch.float64)
    for x, dim in zip(results if isinstance(results, tuple) else (results,), (0, 1), strict=False):
        whole = [64 if n == dim else size for n, size in enumerate(x.shape)]
        weight = torch.arange(torch.Size(whole).numel(), dtype=x.dtype).cos().view(whole)
        total = total + (x * (weight if layout is None else layout.shard(weight, rank, dim))).sum()
    return total


@pytest.mark.covering(1)
@pytest.mark.parametrize("cu_k", [CU, CU_K], ids=["", "keys of other lengths"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_equals_one_process(ranks: int, options: dict[str, Any], cu_k: list[int]) -> None:
    q, k, v = tensors(cu_k[-1])
    expected = weighted(wrap_ring_attn_varlen_func(q, k, v, CU, cu_k, **options))
    want = torch.autograd.grad(expected, (q, k, v))
    layout = Layout.zigzag(64, ranks, CU)

    def part(comm: Comm) -> tuple[Tensor, ...]:
        rows = layout.shard(q.detach(), comm.rank, 0).requires_grad_()
        keys, values = (x.detach().clone().requires_grad_() for x in (k, v))
        out = wrap_zigzag_allgather_attn_varlen_func(
            rows, keys, values, CU, cu_k, process_group=comm, **options
        )
        result = weighted(out, layout, comm.rank)
        return result, *torch.autograd.grad(result, (rows, keys, values))

    parts = run_ranks(ranks, part)
    got = layout.unshard([p[1] for p in parts], 0), *(sum(p[n] for p in parts) for n in (2, 3))
    torch.testing.assert_close(sum(p[0] for p in parts), expected, rtol=1e-12, atol=1e-12)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_between_shuffles() -> None:
    """The rows that it takes are those that wrap_maybe_shuffle gives."""
    q, k, v = (x.detach() for x in tensors())
    want = wrap_ring_attn_varlen_func(q, k, v, CU, CU, causal=True)

    def part(comm: Comm) -> Tensor:
        rows = wrap_maybe_shuffle(q.chunk(2)[comm.rank], CU, process_group=comm)
        out = wrap_zigzag_allgather_attn_varlen_func(
            rows, k, v, CU, CU, causal=True, process_group=comm
        )
        return wrap_maybe_unshuffle(out, CU, process_group=comm)

    torch.testing.assert_close(torch.cat(run_ranks(2, part)), want, rtol=1e-12, atol=1e-12)


def test_without_a_group_it_takes_every_option() -> None:
    q, k, v = tensors()
    for options in (
        {"dropout_p": 0.3, "dropout_seed": 1},
        {"alibi_slopes": torch.rand(4)},
        {"enable_ring": False, "process_group": [0, 1]},
    ):
        got = wrap_zigzag_allgather_attn_varlen_func(q, k, v, CU, CU, **options)
        assert torch.equal(got, wrap_ring_attn_varlen_func(q, k, v, CU, CU, **options))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dropout_p": 0.1, "dropout_seed": 1}, "dropout_p=0.1 does not go with q_rows"),
    ({"alibi_slopes": torch.ones(4)}, "alibi_slopes do not go with rows of a layout"),
    ({"layout": Layout.zigzag(64, 2)}, "layout follows from the group; leave it None"),
    ({"q_rows": (0, 2)}, "q_rows follows from the group; leave it None"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_refused_with_a_group(options: dict[str, Any], message: str) -> None:
    q, k, v = tensors()

    def part(comm: Comm) -> None:
        with pytest.raises(ValueError, match=f"wrap_zigzag_allgather_attn_varlen_func: {message}"):
            wrap_zigzag_allgather_attn_varlen_func(
                q[:32], k, v, CU, CU, process_group=comm, **options
            )

    run_ranks(2, part)


def test_rows_of_another_length() -> None:
    q, k, v = tensors()

    def part(comm: Comm) -> None:
        with pytest.raises(ValueError, match=r"part \d of .* has 32 tokens of 64, but q has 31"):
            wrap_zigzag_allgather_attn_varlen_func(q[:31], k, v, CU, CU, process_group=comm)

    run_ranks(2, part)
