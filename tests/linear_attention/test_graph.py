"""The ops in a graph: fakes, compilation, DTensor, and what engines that generate code see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from linear_cases import LinearCase
from torch import Tensor

from annotations.codegen.public_call import declared_calls
from annotations.registry import registered_ops
from customized_ops.causal_conv1d import wrap_causal_conv1d_func
from customized_ops.causal_conv1d.op import causal_conv1d
from customized_ops.linear_attention import wrap_gated_delta_rule_func
from customized_ops.linear_attention.op import GATED_DELTA_RULE, GATED_LINEAR_ATTN

CHEAP = ("test_schema", "test_autograd_registration", "test_faketensor")
ALL = (*CHEAP, "test_aot_dispatch_dynamic")
LINEAR = "customized_ops.linear_attention.functions"


def given(**changed: Any) -> dict[str, Tensor]:
    case = LinearCase(7, **changed)
    return {name: t.detach().clone().requires_grad_() for name, t in case.given.items()}


@pytest.mark.thin(4)
@pytest.mark.parametrize("states", ["", "both"])
@pytest.mark.parametrize("lengths", [None, (3, 4)])
def test_ops_are_as_torch_wants_them(states: str, lengths: tuple[int, ...] | None) -> None:
    cu = None if lengths is None else torch.tensor([0, 3, 7])
    for delta, ops in ((True, GATED_DELTA_RULE), (False, GATED_LINEAR_ATTN)):
        tensors = {"beta": None, **given(delta=delta, batch=1, lengths=lengths, states=states)}
        own = {"cu_seqlens": cu, "output_final_state": True, "scale": 0.5, "kernel": "torch"}
        op = ops[bool(states)]
        values = {**tensors, **own, "layout": "", "group": ""}
        args = [values[name] for name in op.record.signature.parameters]
        torch.library.opcheck(op.record.forward, args, test_utils=ALL if delta else CHEAP)
    x, weight, bias = torch.randn(1, 7, 2), torch.randn(2, 4), torch.randn(2)
    args = [t.requires_grad_() for t in (x, weight, bias)]
    torch.library.opcheck(
        causal_conv1d.record.forward, (*args, cu, "silu", "auto", "", ""), test_utils=CHEAP
    )


def test_compiled_as_one_graph() -> None:
    def layer(x: Tensor, weight: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k, v = wrap_causal_conv1d_func(x, weight, None, "silu").chunk(3, -1)
        q, k, v = (t.unflatten(-1, (2, 3)) for t in (q, k, v))
        out, state = wrap_gated_delta_rule_func(q, k, v, g, beta, output_final_state=True)
        return out.square().sum() + state.sum()

    torch.manual_seed(0)
    x, weight = torch.randn(1, 7, 18, dtype=torch.float64), torch.randn(18, 3, dtype=torch.float64)
    gates = torch.rand(2, 1, 7, 2, dtype=torch.float64)
    args = [t.requires_grad_() for t in (x, weight, -gates[0], gates[1].clone())]
    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        loss = function(*args)
        results.append([loss, *torch.autograd.grad(loss, args)])
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found, expected, atol=1e-12)


def test_engines_that_generate_code_see_the_functions() -> None:
    calls = declared_calls()
    call = calls[f"{LINEAR}.wrap_gated_delta_rule_func"]
    tensors = given(heads=(2, 4), states="")
    bound_arguments = call.signature.bind(**tensors)
    bound_arguments.apply_defaults()
    arguments = dict(bound_arguments.arguments)
    bound, shapes = call.shapes(arguments, 2)
    assert {split.identifier for split in bound.splits()} == {"b", "l", "g"}
    assert str(shapes["v"]) == "b l (g 2) dv^" and shapes.keys() == {"q", "k", "v", "g", "beta"}
    assert call.outputs(arguments) == 1
    assert call.outputs({**arguments, "output_final_state": True}) == 2
    conv = calls["customized_ops.causal_conv1d.functions.wrap_causal_conv1d_func"]
    told = {"x": torch.randn(2, 6, 3), "weight": torch.randn(3, 4)}
    bound_arguments = conv.signature.bind(**told)
    bound_arguments.apply_defaults()
    bound, _ = conv.shapes(dict(bound_arguments.arguments), 3)
    assert {split.identifier for split in bound.splits()} == {"b", "l", "d"}


def test_lengths_of_any_number_of_documents_are_one_graph_without_states() -> None:
    for name, record in registered_ops().items():
        if name.startswith(("seqshard::gated_", "seqshard::causal_conv1d")):
            wanted = () if name.endswith("_states") else ("cu_seqlens",)
            assert record.rule.repeatable == wanted
