"""The adapter of torch's cuDNN attention; on CPU over dense stand-ins for the two ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense import assert_same, dense_attention
from library_signature import signature_of_op, takes
from torch import Tensor
from windows import draw, gradients

from customized_ops.ring_attention.core.kernels import (
    BackwardOperands,
    ForwardOperands,
    Pairs,
    Request,
    Scoring,
)
from customized_ops.ring_attention.core.kernels.adapters import cudnn, reference
from customized_ops.ring_attention.core.mask.slices import as_slices, normalise, to_dense

WIDE = 9999
SCALE = 0.3
SCORING = Scoring(SCALE)
# rows, keys, slices, calls
SHAPES = {
    "full": (13, 17, [(0, 13, 0, 17, -WIDE, WIDE)], 1),
    "causal": (16, 16, [(0, 16, 0, 16, -WIDE, 0)], 1),
    "causal, more keys": (9, 17, [(0, 9, 0, 17, -WIDE, 8)], 2),
    "causal, more rows": (17, 9, [(0, 17, 0, 9, -WIDE, 0)], 2),
    "some rows": (12, 12, [(3, 8, 0, 5, -WIDE, WIDE)], 1),
    "documents": (12, 12, [(0, 5, 0, 5, -WIDE, 0), (5, 12, 5, 12, -WIDE, 0)], 2),
    "rows twice": (12, 16, [(0, 12, 0, 4, -WIDE, WIDE), (2, 12, 6, 16, -WIDE, 4)], 2),
    "one row and one key": (4, 4, [(1, 2, 0, 4, -WIDE, WIDE), (2, 4, 3, 4, -WIDE, WIDE)], 2),
    "one pair": (3, 3, [(1, 2, 1, 2, -WIDE, WIDE)], 1),
    "documents of one token": (6, 6, [(n, n + 1, n, n + 1, -WIDE, 0) for n in (0, 4, 5)], 3),
    "a corner": (4, 2, [(0, 3, 0, 2, -WIDE, -1)], 1),
    "nothing": (5, 7, [], 0),
}
over_shapes = pytest.mark.parametrize("name", SHAPES)


def pairs_of(name: str, times: int = 1) -> Pairs:
    rows, keys, slices, _ = SHAPES[name]
    large = as_slices([[x * times for x in one] for one in slices])
    return Pairs(normalise(large), rows * times, keys * times)


def tensors(pairs: Pairs, dims: tuple[int, int], dtype: Any = torch.float64) -> list[Tensor]:
    """q, k, v, dout and dlse of two batch entries, four heads of q and two of k."""
    return draw(2, pairs.q_len, pairs.k_len, 2, *dims, dtype=dtype)


def causal_square(rows: int, keys: int, is_causal: bool) -> Tensor:
    assert not is_causal or rows == keys, "the op aligns causal rectangles otherwise"
    mask = torch.ones(rows, keys, dtype=torch.bool)
    return mask.tril() if is_causal else mask


def contiguous(heads_first: Tensor) -> bool:
    """Whether [b, h, l, d] is a view of a dense [b, l, h, d]."""
    return heads_first.transpose(1, 2).is_contiguous()


class StandIn:
    """The two ops with torch's signatures. ``calls`` counts the forward's."""

    def __init__(self, lse_dims: int) -> None:
        self.calls, self._lse_dims = 0, lse_dims

    def forward(self, a: Any) -> tuple[Any, ...]:
        assert a.compute_log_sumexp and a.attn_bias is None and a.dropout_p == 0.0
        self.calls += 1
        mask = causal_square(a.query.shape[2], a.key.shape[2], a.is_causal)
        q, k, v = (t.transpose(1, 2) for t in (a.query, a.key, a.value))
        out, lse = dense_attention(q, k, v, mask, 1.0 if a.scale is None else a.scale)
        lse = lse.float() if self._lse_dims == 3 else lse.float().unsqueeze(-1)
        return out.transpose(1, 2), lse, None, None, *a.query.shape[2:], None, None, None

    def backward(self, a: Any) -> tuple[Tensor, Tensor, Tensor]:
        assert a.logsumexp.ndim == self._lse_dims and a.logsumexp.is_contiguous()
        assert (a.max_q, a.max_k) == (a.query.shape[2], a.key.shape[2]) and a.scale is not None
        assert a.cum_seq_q is None and a.cum_seq_k is None and a.attn_bias is None
        assert (a.max_q, a.max_k) != (1, 1), "s_q = s_kv = 1 is not supported"
        # The op's graphs are kept by what is alike here, and would be wrong for other strides.
        assert contiguous(a.grad_out) and contiguous(a.out)
        mask = causal_square(a.max_q, a.max_k, a.is_causal)
        rows = a.grad_out, a.query, a.key, a.value, a.out
        lse = a.logsumexp.view(a.query.shape[:3])
        given = BackwardOperands(*(t.transpose(1, 2) for t in rows), lse)
        dq, dk, dv = (t.transpose(1, 2) for t in gradients(given, mask, Scoring(a.scale)))
        return dq, dk, dv


@pytest.fixture(params=[3, 4], ids=["lse of 3 dims", "lse of 4 dims"])
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The ops, computed densely."""
    ops = StandIn(request.param)
    name = "_scaled_dot_product_cudnn_attention"
    for op, computed in ((name, ops.forward), (f"{name}_backward", ops.backward)):
        monkeypatch.setattr(torch.ops.aten, op, takes(signature_of_op(op))(computed))
    cudnn._lse_dims.cache_clear()
    return ops


@pytest.mark.covering(1)
@pytest.mark.parametrize("given_lse", [False, True], ids=["", "dlse"])
@over_shapes
def test_against_the_specification(stand_in: StandIn, name: str, given_lse: bool) -> None:
    pairs = pairs_of(name)
    q, k, v, dout, dlse = tensors(pairs, (16, 8))
    asked = dlse if given_lse else None
    want_out, want_lse = reference.forward(ForwardOperands(q, k, v), pairs, SCORING, None)
    kept = pairs, SCORING, None
    given = BackwardOperands(dout, q, k, v, want_out, want_lse, asked)
    want = want_out, want_lse, *reference.backward(given, *kept)
    got = (
        *cudnn.forward(ForwardOperands(q, k, v), pairs, SCORING, None),
        *cudnn.backward(given._replace(lse=want_lse.float()), *kept),
    )
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_same(("out", "lse", "dq", "dk", "dv")[n], a, b, 2e-6)


@pytest.mark.covering(1)
@over_shapes
def test_any_strides(stand_in: StandIn, name: str) -> None:
    """Of all operands, heads first in memory, and of out and dout alone."""
    pairs = pairs_of(name)
    q, k, v, dout, dlse = tensors(pairs, (16, 8))
    kept = pairs, SCORING, None
    out, lse = cudnn.forward(ForwardOperands(q, k, v), *kept)
    out = out.contiguous().to(q.dtype)
    want = cudnn.backward(BackwardOperands(dout, q, k, v, out, lse, dlse), *kept)
    q_, k_, v_, dout_, out_ = (
        t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v, dout, out)
    )
    for qkv in ((q, k, v), (q_, k_, v_)):
        got = cudnn.backward(BackwardOperands(dout_, *qkv, out_, lse, dlse), *kept)
        for n, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_same(("dq", "dk", "dv")[n], a, b, 1e-12)


def test_nothing_is_copied_of_one_whole_sequence(stand_in: StandIn) -> None:
    """Results are the op's own, in its dtype, neither added to zeros nor merged."""
    pairs = pairs_of("causal")
    q, k, v, dout, _ = tensors(pairs, (8, 8), torch.bfloat16)
    out, lse = cudnn.forward(ForwardOperands(q, k, v), pairs, SCORING, None)
    grads = cudnn.backward(BackwardOperands(dout, q, k, v, out, lse), pairs, SCORING, None)
    assert {t.dtype for t in (out, *grads)} == {torch.bfloat16}


@over_shapes
def test_calls(stand_in: StandIn, name: str) -> None:
    """As few as said, and each pair in one of them."""
    pairs = pairs_of(name)
    q, k, v, *_ = tensors(pairs, (8, 8))
    cudnn.forward(ForwardOperands(q, k, v), pairs, SCORING, None)
    assert stand_in.calls == SHAPES[name][3]
    seen = torch.zeros(pairs.q_len, pairs.k_len, dtype=torch.int64)
    for tile in cudnn.tiles(pairs):
        rows, keys = tile.q1 - tile.q0, tile.k1 - tile.k0
        seen[tile.q0 : tile.q1, tile.k0 : tile.k1] += causal_square(rows, keys, tile.causal)
    want = torch.from_numpy(to_dense(pairs.slices, pairs.q_len, pairs.k_len))
    assert torch.equal(seen, want.long())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"features": ("window",)}, "has no window"),
        ({"features": ("deterministic",)}, "has no deterministic"),
        ({"head_dim": 192}, "up to 128 and 128"),
        ({"features": ("lse gradient",), "head_dim": 128, "v_dim": 128}, None),
    ],
)
def test_what_it_takes(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    given = {"dtype": torch.bfloat16, "head_dim": 64, "v_dim": 64, "q_heads": 4, "kv_heads": 2}
    said = cudnn.CAPABILITIES[0].refuses(Request(torch.device("cuda", 0), **(given | changes)))
    assert said is None if reason is None else reason in str(said)


def test_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    assert "without cuDNN" in str(cudnn.missing())
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    for version, reason in ((91001, "91001 is too old"), (91900, "None")):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        assert reason in str(cudnn.missing())


@pytest.mark.gpu
@pytest.mark.parametrize("times", [1, 24])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (64, 128)], ids=str)
@over_shapes
def test_on_a_gpu(name: str, dims: tuple[int, int], times: int) -> None:
    """The ops themselves, lengths as they are and times 24, in bf16 against the reference in fp32.
    Twice, heads first too: the first time builds the graphs that the others find."""
    if cudnn.missing():
        pytest.skip(cudnn.missing() or "")
    pairs = pairs_of(name, times)
    q, k, v, dout, dlse = (t.cuda() for t in tensors(pairs, dims, torch.bfloat16))
    wide = [t.float() for t in (q, k, v)]
    out, lse = reference.forward(ForwardOperands(*wide), pairs, SCORING, None)
    kept = pairs, SCORING, None
    given = BackwardOperands(dout.float(), *wide, out, lse, dlse.float())
    back = reference.backward(given, *kept)
    for heads_first in (False, True, True):
        if heads_first:
            dout, out = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (dout, out))
        given = BackwardOperands(dout, q, k, v, out.bfloat16(), lse, dlse.float())
        got = cudnn.backward(given, *kept)
        results = *cudnn.forward(ForwardOperands(q, k, v), pairs, SCORING, None), *got
        for n, (a, b) in enumerate(zip(results, (out, lse, *back), strict=True)):
            size = b[b.isfinite()].abs().max().item() if b.isfinite().any() else 1.0
            assert_same(
                ("out", "lse", "dq", "dk", "dv")[n], a.cpu(), b.cpu(), 0.02 * max(size, 1.0)
            )
