"""What the executor rounds and what that costs, and that no result depends on who was first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dense import dense_gradients
from torch import Tensor

from customized_ops.ring_attention.core.comm import Comm
from customized_ops.ring_attention.core.comm.inprocess import run_ranks
from customized_ops.ring_attention.core.kernels import BackwardOperands, ForwardOperands, Scoring
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.merge import merge
from customized_ops.ring_attention.core.plan import make_plan
from customized_ops.ring_attention.core.run.executor import attention_backward, attention_forward

from .numerics_cases import (
    CAUSAL,
    DIM,
    FEW_ROWS,
    HEADS,
    KERNEL,
    PLANS,
    SCALE,
    V_DIM,
    Rounding,
    draw,
    over_plans,
    run,
)

NAMES = ("out", "lse", "dq", "dk", "dv")


ONE_CALL_EACH = {"shared", "rows of several ranks"}  # of what travels home


# ------------------------------------------------------------------------------- what travels


@pytest.mark.covering(1)
@over_plans
@pytest.mark.parametrize("kernel", KERNEL)
@pytest.mark.parametrize("lse_gradient", [False, True])
@pytest.mark.parametrize(
    ("dtype", "reduce_dtype"),
    [
        (torch.bfloat16, None),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float16),
        (torch.float64, None),
        (torch.float64, torch.float32),
    ],
)
def test_bytes_are_as_planned(
    name: str,
    kernel: str,
    lse_gradient: bool,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype | None,
) -> None:
    plan = PLANS[name]
    tensors = draw(plan.mask, dtype)
    options = {"lse_gradient": lse_gradient, "reduce_dtype": reduce_dtype}
    _, moved = run(plan, tensors, KERNEL[kernel], **options)
    sizes = (*HEADS, DIM, V_DIM, dtype.itemsize)
    default = dtype.itemsize if name in ONE_CALL_EACH else max(dtype.itemsize, 4)
    itemsize = default if reduce_dtype is None else reduce_dtype.itemsize
    planned = 2 * plan.backward_bytes(*sizes, itemsize, lse_gradient=lse_gradient)
    assert moved == planned.tolist() and planned.sum() > 0
    usual = 2 * plan.backward_bytes(*sizes, lse_gradient=lse_gradient)
    assert (planned.sum() == usual.sum()) == (itemsize == default)


@over_plans
def test_fp32_on_the_wire_costs_fp64_its_rounding(name: str) -> None:
    plan = PLANS[name]
    tensors = draw(plan.mask, torch.float64)
    exact = dense_gradients(*tensors[:3], plan.mask, SCALE, tensors[3])
    usual, rounded = (run(plan, tensors, reduce_dtype=d)[0] for d in (None, torch.float32))
    errors = {}
    for label, truth, a, b in zip(NAMES, exact, usual, rounded, strict=True):
        assert (a - truth).abs().max() < 1e-12, label
        errors[label] = ((b - truth).abs().max() / truth.abs().max()).item()
    assert max(errors["out"], errors["lse"]) < 1e-12, "only gradients travel so"
    assert max(errors.values()) < 2e-7
    moved = {"dq": plan.q_tokens(), "dk": plan.kv_tokens(), "dv": plan.kv_tokens()}
    for label, tokens in moved.items():
        assert (errors[label] > 1e-9) == bool(tokens.any()), label


def errors(got: list[Tensor], want: tuple[Tensor, ...]) -> list[float]:
    """Root mean square error of each result."""
    return [(g.double() - w).square().mean().sqrt().item() for g, w in zip(got, want, strict=True)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernel", KERNEL)
@pytest.mark.parametrize("stages", [0, 7])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("assignment", ["owner", "balanced", "shared"])
def test_bf16_on_the_wire_is_nearly_as_good_as_one_device(
    kernel: str, stages: int, ranks: int, assignment: str
) -> None:
    """At most twice the errors of one device, and the rounding of what the other ranks add."""
    mask = AttnMask.dense(256, causal=True)
    low = draw(mask, torch.bfloat16)
    exact = [t.double() for t in low]
    want = dense_gradients(*exact[:3], mask, SCALE, exact[3])
    options = {"assignment": assignment, "heads": HEADS}
    alone, _ = run(make_plan(mask, Layout.contiguous(256, 1), **options), low, KERNEL[kernel])
    plan = make_plan(mask, Layout.contiguous(256, ranks), stages=stages, **options)
    many, _ = run(plan, low, KERNEL[kernel], reduce_dtype=torch.bfloat16)
    for n, (one, error) in enumerate(zip(errors(alone, want), errors(many, want), strict=True)):
        size = want[n].square().mean().sqrt().item()
        limit = 2 * one + (ranks - 1) * torch.finfo(torch.bfloat16).eps / 2 * size
        assert error <= limit, f"{NAMES[n]}: error {error:.3e} > {limit:.3e}"


@pytest.mark.parametrize("stages", [0, 3])
def test_what_a_rank_holds_itself_is_not_rounded(stages: int) -> None:
    """The last rank's keys are attended by nobody else, the others' are."""
    options = {"assignment": "owner", "stages": stages, "heads": HEADS}
    plan = make_plan(CAUSAL, Layout.contiguous(64, 4), **options)
    tensors = draw(CAUSAL, torch.float64)
    usual, rounded = (run(plan, tensors, reduce_dtype=d)[0] for d in (None, torch.bfloat16))
    for a, b in zip(usual[3:], rounded[3:], strict=True):
        assert torch.equal(a[:, 48:], b[:, 48:])
        assert not torch.equal(a[:, :48], b[:, :48])
    assert all(map(torch.equal, usual[:3], rounded[:3]))


# --------------------------------------------------------------------------- what is made


class Passed:
    """A kernel that remembers what it returned."""

    def __init__(self) -> None:
        self.made: list[Tensor] = []

    forward = staticmethod(Rounding.forward)

    def backward(self, *given: Any, **options: Any) -> tuple[Tensor, ...]:
        """As rounding ones do."""
        self.made = list(Rounding.backward(*given, **options))
        return tuple(self.made)


def test_gradients_of_one_call_are_returned_as_they_are() -> None:
    kernel, tensors = Passed(), draw(CAUSAL, torch.bfloat16)
    plan = make_plan(CAUSAL, Layout.contiguous(64, 1))

    def body(comm: Comm) -> tuple[Tensor, ...]:
        q, k, v, dout = tensors
        out, lse = attention_forward(plan, comm, kernel, ForwardOperands(q, k, v), Scoring(SCALE))
        given = BackwardOperands(dout, q, k, v, out, lse)
        return attention_backward(plan, comm, kernel, given, Scoring(SCALE))

    (grads,) = run_ranks(1, body)
    assert all(a is b for a, b in zip(grads, kernel.made, strict=True))


@pytest.mark.parametrize("stages", [1, 3])
def test_no_zeros_where_there_is_a_part(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def zeros_like(like: Tensor, **options: Any) -> Tensor:
        made.append(like.numel())
        return torch.zeros_like(like, **options)

    stand_in = SimpleNamespace(**vars(torch) | {"zeros_like": zeros_like})
    monkeypatch.setattr(merge, "torch", stand_in)
    options = {"assignment": "owner", "stages": stages, "heads": HEADS}
    run(make_plan(CAUSAL, Layout.zigzag(64, 4), **options), draw(CAUSAL, torch.bfloat16))
    assert not any(made)
    apart = Layout.from_sizes([4, 0]), Layout.from_sizes([0, 128])
    run(make_plan(FEW_ROWS, *apart, assignment="nearest"), draw(FEW_ROWS, torch.bfloat16))
    assert any(made), "rows that only others compute have no part to begin with"
