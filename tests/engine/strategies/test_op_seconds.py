"""How many operations an op takes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from annotations.engines.torch.strategies.op_seconds import flops


class Ops(nn.Module):
    """Products of matrices in several forms, and ops without any."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 128)
        self.weight, self.bias = nn.Parameter(torch.randn(128, 64)), nn.Parameter(torch.randn(64))
        self.convolution, self.norm = nn.Conv1d(8, 8, 3, padding=1), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.up(self.norm(x)).reshape(-1, 128)
        y = torch.addmm(self.bias, rows, self.weight).reshape(2, 8, 64)
        y = torch.einsum("bld,bmd->blm", y, x) @ x
        q = y.reshape(2, 8, 4, 16).transpose(1, 2)
        z = F.scaled_dot_product_attention(q, q[:, :2], q[:, :2], enable_gqa=True)
        larger = F.interpolate(y[:, None], scale_factor=2, mode="bilinear")
        return self.convolution(y) + z.sum() + larger.sum()


def test_matrix_products_are_counted_in_all_ops() -> None:
    graph = torch.export.export(Ops(), (torch.randn(2, 8, 64),)).graph
    counted = {
        str(node.target).split(".")[1]: flops(node)
        for node in graph.nodes
        if node.op == "call_function" and flops(node)
    }
    assert counted == {
        "linear": 2 * 16 * 64 * 128,
        "addmm": 2 * 16 * 128 * 64,
        "einsum": 2 * 2 * 8 * 8 * 64,
        "matmul": 2 * 2 * 8 * 8 * 64,
        "scaled_dot_product_attention": 2 * 2 * (2 * 4 * 8 * 8 * 16),
        "conv1d": 2 * 2 * 8 * 64 * 8 * 3,
    }


def test_an_op_that_refuses_tensors_without_data_counts_none() -> None:
    library = torch.library.Library("seqshard_op_seconds", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")

    def twice(x: Tensor) -> Tensor:
        return {"cpu": x @ x}[x.device.type]

    library.impl("twice", twice, "CompositeImplicitAutograd")
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 4)
    node = graph.call_function(torch.ops.seqshard_op_seconds.twice.default, (x,))
    assert flops(node) == 0.0
