"""Calls that hold a part of q's rows or heads, and all of k and v: together the whole call."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from dense import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import Case, expected, same
from op_table import TABLE
from refusals import refusals
from torch import Tensor

from annotations import BindingError
from customized_ops.ring_attention import (
    AttnMask,
    Layout,
    wrap_masked_attn_func,
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
    wrap_sliding_window_attn_func,
    wrap_streaming_attn_func,
    wrap_zigzag_attn_func,
)
from customized_ops.ring_attention.op.query_shards import KeyHeads

CASES = {name: case for name, case in TABLE.items() if not (case.dropout or case.layout)} | {
    "all of it but dropout": replace(TABLE["all of it"], dropout=0.0),
    "alibi, packed, grouped": Case("varlen", 9, heads=(4, 2), alibi=True, cu_seqlens=(0, 4, 9)),
    "alibi, streaming": Case("streaming", 13, alibi=True, window=(3, -1), sink_tokens=2),
}
# Where the tokens and the heads of q, out and dq stand, and those of lse.
ROWS, HEADS = (-3, -1), (-2, -2)


def shard(t: Tensor, dim: int, i: int, n: int) -> Tensor:
    """Part i of n, as DTensor's Shard cuts."""
    each = -(-t.shape[dim] // n)
    start = min(i * each, t.shape[dim])
    return t.narrow(dim, start, min(each, t.shape[dim] - start)).clone()


def run(case: Case, dims: tuple[int, int] = ROWS, i: int = 0, n: int = 1) -> list[Tensor]:
    """out, lse and gradients of a loss of both, from a part of q; of all of it if n is 1."""
    q, k, v, dout = case.tensors()
    slopes, sink = case.per_head()
    whole_lse = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    dlse = torch.linspace(-1, 2, q[..., 0].numel(), dtype=torch.float64).view(whole_lse)
    where: dict[str, Any] = {}
    if n > 1 and dims is ROWS:
        where["q_rows"] = (i, n)
    if n > 1 and dims is HEADS:
        where["q_heads"] = (i, n)
        slopes, sink = (None if t is None else shard(t, 0, i, n) for t in (slopes, sink))
    if slopes is not None:
        where["alibi_slopes"] = slopes
    given = (
        (shard(q, dims[0], i, n), k, v) if sink is None else (shard(q, dims[0], i, n), k, v, sink)
    )
    leaves = [t.detach().clone().requires_grad_() for t in given]
    out, lse = case.call(*leaves, **where)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    loss = (out * shard(dout, dims[0], i, n)).sum() + (finite * shard(dlse, dims[1], i, n)).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


def together(parts: list[list[Tensor]], dims: tuple[int, int]) -> list[Tensor]:
    """The whole of results and dq; sums of the gradients that every part has whole."""
    out, lse, dq, dk, dv, *dsink = zip(*parts, strict=True)
    whole = [torch.cat(t, dim) for t, dim in zip((out, lse, dq), (*dims, dims[0]), strict=True)]
    sinks = [torch.cat(t) if dims is HEADS else sum(t) for t in dsink]
    return [*whole, sum(dk), sum(dv), *sinks]


def check(case: Case, dims: tuple[int, int], n: int) -> None:
    parts = [run(case, dims, i, n) for i in range(n)]
    want = run(case)
    same(together(parts, dims), want)
    same(want[:2], expected(case)[:2])  # and the whole call is right


@pytest.mark.thin(4)
@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("name", CASES)
def test_rows(name: str, n: int) -> None:
    """Uneven parts, and with 8 some that are empty."""
    check(CASES[name], ROWS, n)


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.heads[0] % 2 == 0])
def test_heads(name: str) -> None:
    for n in (2, CASES[name].heads[0]):
        check(CASES[name], HEADS, n)


def test_rows_and_heads() -> None:
    case = replace(CASES["all of it but dropout"], heads=(6, 2))
    want = run(case)
    dk = torch.zeros_like(want[3])
    q, k, v, dout = case.tensors()
    slopes, sink = case.per_head()
    for row in range(3):
        for head in range(3):

            def part(t: Tensor, tokens: int = row, heads: int = head) -> Tensor:
                return shard(shard(t, -3, tokens, 3), -2, heads, 3)

            key = k.clone().requires_grad_()
            how = {"q_rows": (row, 3), "q_heads": (head, 3)}
            how["alibi_slopes"] = shard(slopes, 0, head, 3)
            out, lse = case.call(part(q), key, v, shard(sink, 0, head, 3), **how)
            assert_same("out", out, part(want[0]))
            assert_same("lse", lse, shard(shard(want[1], -1, row, 3), -2, head, 3))
            dlse = torch.linspace(-1, 2, want[1].numel(), dtype=torch.float64).view(want[1].shape)
            loss = (out * part(dout)).sum()
            loss = loss + (lse * shard(shard(dlse, -1, row, 3), -2, head, 3)).sum()
            dk += torch.autograd.grad(loss, key)[0]
    assert_same("dk", dk, want[3])


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 4), st.integers(1, 5))
def test_heads_of_keys(first: int, count: int, group: int, more: int) -> None:
    """Any run of heads; the gradient is that of repeating the heads of k, taken apart."""
    heads = -(-(first + count) // group) + more
    own = KeyHeads(first, count, group)
    k = torch.randn(2, heads, 3, dtype=torch.float64, requires_grad=True)
    repeated = k.repeat_interleave(group, -2)[:, first : first + count]
    got = own.of(k)
    if count:
        assert count % got.shape[-2] == 0
        assert torch.equal(got.repeat_interleave(count // got.shape[-2], -2), repeated)
    weights = torch.randn_like(repeated)
    (want,) = torch.autograd.grad((repeated * weights).sum(), k)
    per_key = weights.unflatten(-2, (got.shape[-2], -1)).sum(-2) if count else weights
    assert_same("gradient", own.spread(per_key, k), want, 1e-14)


Q, K = torch.zeros(2, 8, 4, 16), torch.zeros(2, 8, 2, 16)
ZIGZAG = Layout.zigzag(8, 1)
OPS: dict[str, Callable[..., Any]] = {
    "wrap_ring_attn_func": wrap_ring_attn_func,
    "wrap_zigzag_attn_func": wrap_zigzag_attn_func,
    "wrap_sliding_window_attn_func": wrap_sliding_window_attn_func,
    "wrap_streaming_attn_func": lambda *t, **how: wrap_streaming_attn_func(*t, 3, 1, **how),
    "wrap_masked_attn_func": lambda *t, **how: wrap_masked_attn_func(*t, AttnMask.causal(8), **how),
    "wrap_ring_attn_varlen_func": lambda q, k, v, **how: wrap_ring_attn_varlen_func(
        q[0], k[0], v[0], [0, 3, 8], [0, 3, 8], **how
    ),
}
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"q_rows": (2, 2)}, "q_rows must be (i, n) for part i of n, 0 <= i < n, or None, got (2, 2)"),
    ({"q_rows": 2}, "q_rows must be (i, n) for part i of n, 0 <= i < n, or None, got 2"),
    (
        {"q_heads": (0, 0)},
        "q_heads must be (i, n) for part i of n, 0 <= i < n, or None, got (0, 0)",
    ),
    (
        {"q_heads": (True, 2)},
        "q_heads must be (i, n) for part i of n, 0 <= i < n, or None, got (True, 2)",
    ),
    ({"q_rows": (1, 3)}, "part 1 of 3 of 8 tokens is 3:6, but q has 8 tokens"),
    (
        {"q_rows": (0, 1), "layout": ZIGZAG},
        "with q_rows k and v are whole and q is cut contiguously; leave layout None, got "
        "zigzag:8:1",
    ),
    (
        {"q_rows": (0, 1), "dropout_p": 0.5, "dropout_seed": 1},
        "dropout_p=0.5 does not go with q_rows: it draws by the tokens and heads of the "
        "whole; set it to 0",
    ),
    (
        {"q_heads": (0, 1), "dropout_p": 0.5, "dropout_seed": 1},
        "dropout_p=0.5 does not go with q_heads: it draws by the tokens and heads of the "
        "whole; set it to 0",
    ),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("how", "message"), REFUSALS)
def test_refusals(op: str, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        OPS[op](Q, K, K, **how)
    assert str(caught.value) == f"{op}: {message}"


def test_heads_that_do_not_fit() -> None:
    with pytest.raises(ValueError) as caught:
        wrap_ring_attn_func(Q, Q[:, :, :3], Q[:, :, :3], q_heads=(1, 2))
    assert str(caught.value) == (
        "wrap_ring_attn_func: k has 3 heads and q 8, of which it holds part 1 of 2; the heads of q "
        "must be a multiple of those of k"
    )


def test_dims_that_do_not_fit_say_how_a_part_is_annotated() -> None:
    with pytest.raises(BindingError, match=re.escape("b lq^ qh^ hd^, b al^ g^ hd^, b al^ g^ vd^")):
        wrap_ring_attn_func(Q[:, :4], K, K[:, :7], q_rows=(0, 2), q_heads=(0, 2))


def test_a_group_is_refused_on_every_rank() -> None:
    def call(comm: Any) -> None:
        wrap_ring_attn_func(Q[:, :4], K, K, q_rows=(comm.rank, 2), process_group=comm)

    said = (
        "wrap_ring_attn_func: with q_rows k and v are whole and nothing moves; leave process_group "
        "None, got a group of 2 ranks"
    )
    assert refusals(2, call) == [said] * 2


def test_all_rows_or_heads_are_the_plain_call() -> None:
    case = Case("ring", 9, heads=(4, 2))
    q, k, v, _ = case.tensors()
    want = wrap_ring_attn_func(q, k, v)
    assert_same("rows", wrap_ring_attn_func(q, k, v, q_rows=(0, 1)), want)
    assert_same("heads", wrap_ring_attn_func(q, k, v, q_heads=(0, 1)), want)


@pytest.mark.parametrize("op", ["ring", "varlen", "masked"])
def test_parts_compile(op: str) -> None:
    case = replace(CASES["alibi, packed, grouped"], op=op, given=AttnMask.causal(9))
    q, k, v, _ = case.tensors()
    slopes = shard(case.per_head()[0], 0, 1, 2)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return case.call(q, k, v, q_rows=(1, 2), q_heads=(1, 2), alibi_slopes=slopes)[0]

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    part = shard(shard(q, -3, 1, 2), -2, 1, 2)
    results = []
    for function in (call, compiled):
        leaves = [t.clone().requires_grad_() for t in (part, k, v)]
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for name, a, b in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        assert_same(name, b, a, 1e-12)
