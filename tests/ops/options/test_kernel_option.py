"""Kernels that are asked for: what they cannot do, and how they round."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dense import assert_same
from op_cases import Case, check_rounding, cut, run_rank

from customized_ops.ring_attention import AttnMask, Layout, make_plan, wrap_ring_attn_func
from customized_ops.ring_attention.core.kernels import Request
from customized_ops.ring_attention.core.kernels.adapters import reference
from customized_ops.ring_attention.op import call as kernel_request


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"softcap": 2.0}, "has no softcap"),
        ({"dropout_p": 0.1}, "has no dropout"),
        ({"softcap": 2.0, "dropout_p": 0.1}, "has no softcap, dropout"),
    ],
)
def test_a_kernel_that_cannot_says_why_and_which_can(options: Any, reason: str) -> None:
    q, k, v, _ = Case("ring", 8).tensors()
    with pytest.raises(ValueError, match=re.escape(f"({reason}); able: reference")):
        wrap_ring_attn_func(q, k, v, kernel="torch", **options)


@pytest.mark.parametrize("op", ["ring", "zigzag", "window", "streaming"])
def test_what_32_bit_indices_do_not_reach_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """By a bound that no tensor of a kernel call exceeds on any rank."""
    asked: list[tuple[int, bool]] = []
    given: list[int] = []

    def most(*args: Any) -> int:
        asked.append((found := most_elements(*args), found >= kernel_request.LARGE))
        return found

    def choose(name: str, kernel: str, request: Request) -> Any:
        assert ("64-bit indices" in request.features) == asked[-1][1]
        return SimpleNamespace(NAME="spy", forward=forward, backward=reference.backward)

    def forward(*args: Any) -> Any:
        given.extend(t.numel() for t in args[0])
        return reference.forward(*args)

    most_elements = kernel_request.most_elements
    monkeypatch.setattr(kernel_request, "most_elements", most)
    monkeypatch.setattr(kernel_request, "choose", choose)
    monkeypatch.setattr(kernel_request, "LARGE", 3000)
    for case in (
        Case(op, 45, heads=(4, 2), dims=(8, 12), batch=2),
        Case(op, 46, heads=(4, 2), dims=(8, 6), layout="contiguous"),
        Case(op, 47, heads=(4, 2), dims=(8, 6), sizes=(40, 0, 7)),
    ):
        asked.clear()
        given.clear()
        cut(case, 3)
        assert max(given) <= min(bound for bound, _ in asked)
        assert len({bound for bound, _ in asked}) == 1, "ranks ask for different things"
    assert run_rank(Case(op, 45, heads=(4, 2), dims=(8, 12), batch=2), 0, 1, None)
    assert asked[-1] == (2 * 45 * 4 * 12, True)


@pytest.mark.parametrize(
    ("ranks", "tokens", "heads", "team_size", "most"),
    [
        (1, 1 << 19, (32, 8), 1, (1 << 19) * 32),
        (2, 1 << 19, (32, 8), 1, (1 << 18) * 32),
        (4, 1 << 18, (64, 8), 1, (1 << 16) * 64),
        (4, 1 << 18, (8, 8), 1, (1 << 18) * 8),  # keys that are gathered
        (8, 1 << 20, (64, 8), 8, (1 << 20) * 8),
    ],
)
def test_the_bound_on_elements_is_tight(
    ranks: int, tokens: int, heads: tuple[int, int], team_size: int, most: int
) -> None:
    layout = Layout.zigzag(tokens, ranks)
    options = {"heads": heads, "team_size": team_size, "stages": 0, "assignment": "owner"}
    plan = make_plan(AttnMask.causal(tokens), layout, **options)
    q, k = (torch.empty(1, tokens // ranks, h, 128, device="meta") for h in heads)
    assert kernel_request.most_elements(plan, q, k, heads[1]) == 128 * most


@pytest.mark.parametrize("options", [{"alibi": True}, {"sink": True}, {"alibi": True, "batch": 2}])
def test_kernels_agree(options: dict[str, Any]) -> None:
    case = Case("ring", 20, heads=(4, 2), **options)
    given = (*case.tensors()[:3], case.per_head()[1])
    torchs, ours = (case.call(*given, kernel=kernel) for kernel in ("torch", "reference"))
    assert_same("out", torchs[0], ours[0])
    assert_same("lse", torchs[1], ours[1])


ROUGH = Case("ring", 192, heads=(4, 2), dims=(16, 16), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 2.0},
        {"alibi": True},
        {"dropout": 0.2},
        {"sink": True},
        {"softcap": 2.0, "alibi": True, "dropout": 0.2, "sink": True},
    ],
    ids=lambda options: "+".join(options),
)
def test_bf16_error_is_the_kernels_own(options: dict[str, Any]) -> None:
    check_rounding(replace(ROUGH, **options), 4)
