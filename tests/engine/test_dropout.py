"""Dropout under the embedded engine: any plan drops what one process drops."""

from __future__ import annotations

import math
from typing import Any

import dropout_jobs as jobs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Pool, worlds
from steps import assert_gradients

from annotations.engines.torch.capture.dropout import MAX_CUT_DIMS, kept


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("policy", "shape"),
    [
        pytest.param("cp", (4,), marks=pytest.mark.slow),
        ("cp", (2,)),
        pytest.param(jobs.by_batch, (2,), marks=pytest.mark.slow),
        (jobs.on_columns, (2,)),
        pytest.param(jobs.on_columns, (4,), marks=pytest.mark.slow),
        pytest.param(jobs.on_two_axes, (2, 2), marks=pytest.mark.slow),
        pytest.param("hybrid", (2, 2), marks=pytest.mark.slow),
    ],
)
@worlds(cpus=[2, 4], gpus=[4])
def test_any_plan_drops_the_same(
    ranks: Pool, monkeypatch: pytest.MonkeyPatch, policy: Any, shape: tuple[int, ...]
) -> None:
    """And each step others, and each copy others."""
    plan = math.prod(shape)
    if plan > ranks.size:
        pytest.skip("a copy is of more ranks")
    copies = ranks.size // plan
    replies = ranks.run(jobs.dropped, policy, shape)
    model, losses = jobs.Dropping(), set()
    torch.manual_seed(7)
    for step in range(2):
        model.zero_grad()
        seed = int(torch.randint(2**63 - 1, ()))
        for copy in range(copies):
            with monkeypatch.context() as patch:
                patch.setattr(torch.nn.functional, "dropout", jobs.OneProcess(seed, copy))
                loss = model(jobs.inputs())
            loss.backward()
            losses.add(loss.item())
            for rank in range(copy * plan, (copy + 1) * plan):
                assert replies[rank][step][0] == pytest.approx(loss.item(), abs=1e-10)
        for reply in replies:
            assert_gradients(f"step {step}", reply[step][1], model)
    assert len(losses) == 2 * copies


def mask(sizes: list[int], first: list[int], shape: list[int], p: float = 0.4) -> torch.Tensor:
    seed, part = torch.tensor([9, 0]), torch.empty(shape)
    return kept(seed, p, 3, sizes, first + [0] * (MAX_CUT_DIMS - len(first)), part)


@given(st.lists(st.tuples(st.integers(1, 7), st.integers(0, 6)), min_size=1, max_size=5), st.data())
@settings(deadline=None, derandomize=True, max_examples=40)
def test_a_part_is_a_part_of_the_whole(dims: list[tuple[int, int]], data: st.DataObject) -> None:
    sizes = [size for size, _ in dims]
    first = [min(start, size) for size, start in dims]
    shape = [data.draw(st.integers(0, s - f)) for s, f in zip(sizes, first, strict=True)]
    whole = mask(sizes, [0] * len(sizes), sizes)
    for dim, (start, count) in enumerate(zip(first, shape, strict=True)):
        whole = whole.narrow(dim, start, count)
    assert torch.equal(mask(sizes, first, shape), whole)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rate(p: float) -> None:
    """Within five standard deviations, of rows and of columns too."""
    keep = mask([300, 400], [0, 0], [300, 400], p).double()
    for dims, count in ((None, 120_000), (0, 300), (1, 400)):
        share = keep.mean() if dims is None else keep.mean(dims)
        assert (share - (1 - p)).abs().max() < 5 * (p * (1 - p) / count) ** 0.5


@pytest.mark.parametrize("p", [0.25, 1.0])
def test_gradients(p: float) -> None:
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    seed = torch.tensor([5, 1])
    drop = lambda x: torch.ops.seqshard.dropout(x, seed, p, 2, [3, 5], *[0] * 5)  # noqa: E731
    assert torch.autograd.gradcheck(drop, x)
    assert drop(x).eq(0).any() and (p == 1 or drop(x).ne(0).any())
