"""The example of an op along the sequence, against its definition and under the engine."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from own_ops.token_shift import token_shift
from torch import Tensor, nn

from annotations import ComputeConfig
from annotations.engines.torch import plan_without_ranks
from customized_ops.ring_attention import DisagreementError, Layout, run_ranks

ENDS = [0, 6, 6, 13]


def defined(x: Tensor, mix: Tensor) -> Tensor:
    parts = [x[:, a:b] for a, b in pairwise(ENDS)]
    before = torch.cat([nn.functional.pad(p, (0, 0, 1, 0))[:, :-1] for p in parts], 1)
    return x + mix * (before - x)


@pytest.mark.parametrize(
    "layout", [Layout.contiguous(13, 3), Layout.zigzag(13, 3), Layout.from_sizes([9, 0, 4])]
)
def test_values_and_gradients(layout: Layout) -> None:
    x, mix, dy = (torch.randn(s, dtype=torch.float64) for s in ((1, 13, 4), (4,), (1, 13, 4)))

    def rank(comm: Any) -> list[Tensor]:
        mine = [layout.shard(x, comm.rank).requires_grad_(), mix.clone().requires_grad_()]
        y = token_shift(*mine, ENDS, comm, layout=layout)
        return [y.detach(), *torch.autograd.grad(y, mine, layout.shard(dy, comm.rank))]

    ys, dxs, dmixes = zip(*run_ranks(3, rank), strict=True)
    leaves = [x.clone().requires_grad_(), mix.clone().requires_grad_()]
    y = defined(*leaves)
    found = layout.unshard(ys), layout.unshard(dxs), torch.stack(dmixes).sum(0)
    for mine, exact in zip(found, (y, *torch.autograd.grad(y, leaves, dy)), strict=True):
        torch.testing.assert_close(mine, exact.detach(), rtol=0, atol=1e-12)


def test_other_documents_on_one_rank() -> None:
    def rank(comm: Any) -> str:
        with pytest.raises(DisagreementError) as error:
            token_shift(torch.ones(1, 4, 2), torch.ones(2), [0, 5 + comm.rank, 8], comm)
        return str(error.value)

    assert all("cu_seqlens" in said for said in run_ranks(2, rank))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        return token_shift(x, self.mix, cu_seqlens).square().sum()


def test_the_engine_cuts_it() -> None:
    given = {"x": torch.randn(1, 12, 4), "cu_seqlens": torch.tensor([0, 6, 12])}
    plan = str(plan_without_ranks(Model(), given, "cp", ComputeConfig(2, 2)))
    assert "token_shift" in plan and "l / 2" in plan and "tokens before" in plan
