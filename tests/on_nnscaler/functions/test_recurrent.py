"""Layers that are not attention: nnscaler knows their functions, and trains with them cut."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from nnscaler.graph.parser.register import CustomizedOps
from ranks import Pool

from annotations.engines import nnscaler as engine
from customized_ops.causal_conv1d import wrap_causal_conv1d_func
from customized_ops.linear_attention import wrap_gated_delta_rule_func, wrap_gated_linear_attn_func
from on_nnscaler.models import recurrent_models
from on_nnscaler.support import jobs, policies

pytestmark = pytest.mark.nnscaler

FUNCTIONS = [wrap_causal_conv1d_func, wrap_gated_delta_rule_func, wrap_gated_linear_attn_func]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_are_registered(function: Any) -> None:
    name = f"{function.__module__}.{function.__name__}"
    assert CustomizedOps.kOpMap[name] is engine.make_node
    assert CustomizedOps.kOpEmit[name] is engine.emit
    assert CustomizedOps.kOpRuntime[f"{name}.traced"] is function


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("wrap_gated_delta_rule_func", "l"),
        ("wrap_gated_delta_rule_func", "g"),
        ("wrap_gated_linear_attn_func", "l"),
        ("wrap_causal_conv1d_func", "l"),
        ("wrap_causal_conv1d_func", "d"),
    ],
)
def test_two_ranks(two_ranks: Pool, name: str, cut: str) -> None:
    policy = partial(policies.attention, cuts=[(cut, 2)], name=name)
    model = recurrent_models.recurrent(delta=name != "wrap_gated_linear_attn_func")
    ranks = jobs.trained(two_ranks, jobs.Training(model, recurrent_models.batch, policy, plan=2))
    assert ("process_group=[0, 1]" in ranks[0].code) == (cut == "l")
