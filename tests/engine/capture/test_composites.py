"""Composite ops of a program stay as they are, as torch leaves them when it looks at all ops."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import exported_program

from annotations.engines.torch.capture import composites


class Composites(nn.Module):
    """Of ops that stay, and of one, dropout, that does not, as it is random."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.linear(x), 0.5).softmax(-1)
        x = F.scaled_dot_product_attention(x, x.chunk(2)[0].repeat(2, 1, 1), x)
        return torch.einsum("bij,bkj->bik", x, x).matmul(x.flatten(1)[:, :4, None])


def test_the_same_program_from_fewer_ops() -> None:
    exported = torch.export.export(Composites(), (torch.randn(2, 4, 8),), strict=False)
    full = exported.run_decompositions({})
    every = getattr(exported_program, composites.EVERY)()
    with composites.kept_of(exported):
        kept = getattr(exported_program, composites.EVERY)()
        found = exported.run_decompositions({})
    assert torch.ops.aten.linear.default in kept and kept < every and len(kept) < 20
    assert found.graph_module.code == full.graph_module.code
    assert "linear" in found.graph_module.code and "aten.dropout" not in found.graph_module.code
    assert getattr(exported_program, composites.EVERY)() == every
