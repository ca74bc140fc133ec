"""The ops inside graphs: torch.compile, torch.export, opcheck."""

from __future__ import annotations

import pytest
import torch
from op_cases import DENSE_OPS
from torch import Tensor, nn

from customized_ops.ring_attention import wrap_ring_attn_varlen_func


class Model(nn.Module):
    def __init__(self, op: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.op, self.project = op, nn.Linear(8, 8).double()

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        q, k = self.project(x), x[:, :, :2]
        if self.op == "varlen":
            out, lse = wrap_ring_attn_varlen_func(
                q[0], k[0], k[0], cu_seqlens, cu_seqlens, causal=True, return_lse=True
            )
            return out.square().sum() + lse.sum()
        return DENSE_OPS[self.op](q, k, k, window_size=(5, -1)).square().sum()


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(1, 12, 4, 8, dtype=torch.float64)
    return x, torch.tensor([0, 5, 12], dtype=torch.int32)


@pytest.mark.parametrize("op", ["ring", "zigzag", "varlen"])
def test_compiles_whole(op: str) -> None:
    model = Model(op)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x, cu = inputs()
    results = []
    for module in (model, compiled):
        model.zero_grad()
        y = x.clone().requires_grad_()
        loss = module(y, cu)
        loss.backward()
        results.append((loss.detach(), y.grad, model.project.weight.grad.clone()))
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(eager, graph, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", ["ring", "zigzag", "varlen"])
def test_exports_as_one_node(op: str) -> None:
    graph = torch.export.export(Model(op), inputs(), strict=False).graph
    nodes = [n for n in graph.nodes if getattr(n.target, "namespace", "") == "seqshard"]
    name = {"ring": "ring_attn", "zigzag": "zigzag_attn", "varlen": "ring_attn_varlen"}[op]
    assert [n.target._opname for n in nodes] == [name]


@pytest.mark.parametrize("name", ["ring_attn", "zigzag_attn", "ring_attn_varlen"])
def test_opcheck(name: str) -> None:
    """Schema, fake and autograd registration as torch's own checker sees them."""
    packed = name.endswith("varlen")
    shape = (10, 4, 8) if packed else (2, 10, 4, 8)
    q = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    k, v = (q.detach()[..., :2, :].clone().requires_grad_() for _ in range(2))
    cu = [torch.tensor([0, 4, 10])] * 2 if packed else []
    packed_only = (-1, 6, True) if packed else ()
    args = (q, k, v, *cu, 0.3, True, -1, -1, *packed_only, "auto", "", "")
    torch.library.opcheck(getattr(torch.ops.seqshard, name).default, args)


def test_max_seqlen_is_checked_in_a_graph_too() -> None:
    def call(q: Tensor, cu: Tensor) -> Tensor:
        return wrap_ring_attn_varlen_func(q, q, q, cu, cu, max_seqlen_q=3)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="max_seqlen_q=3, but the longest document has 7"):
        compiled(torch.zeros(12, 4, 8), inputs()[1])
