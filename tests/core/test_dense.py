"""The helpers that other tests rely on: they must be right, and they must be able to fail."""

import pytest
import torch
from dense import assert_same, dense_attention, dense_gradients
from torch.nn.functional import scaled_dot_product_attention

INF = torch.inf
RIGHT = torch.tensor([1.0, -INF, 0.0, INF], dtype=torch.float64)


def with_value(index: int, value: float) -> torch.Tensor:
    changed = RIGHT.clone()
    changed[index] = value
    return changed


@pytest.mark.parametrize(
    ("got", "message"),
    [
        (with_value(0, 1.0 + 2e-10), "x: error 2.000e-10 > 1.000e-10"),
        (with_value(2, float("nan")), "x: 1 of 4 are NaN"),
        (with_value(1, 0.0), "x: infinities differ"),
        (with_value(2, -INF), "x: infinities differ"),
        (with_value(1, INF), "x: infinities differ in sign"),
        (RIGHT.unsqueeze(0), "x: shape (1, 4), want (4,)"),
        (RIGHT[:3], "x: shape (3,), want (4,)"),
    ],
)
def test_assert_same_fails(got, message):
    with pytest.raises(AssertionError) as info:
        assert_same("x", got, RIGHT)
    assert str(info.value).splitlines()[0] == message


def test_assert_same_refuses_a_nan_in_the_expectation():
    nan = with_value(0, float("nan"))
    with pytest.raises(AssertionError, match="the expected value has NaN"):
        assert_same("x", nan, nan)


def test_assert_same_passes():
    assert_same("x", RIGHT.clone(), RIGHT)
    assert_same("x", with_value(0, 1.0 + 5e-11), RIGHT)
    assert_same("x", with_value(0, 1.5), RIGHT, tolerance=0.5)
    assert_same("nothing", torch.zeros(0, 3), torch.zeros(0, 3))


def inputs(q_len: int = 5, k_len: int = 7, kv_heads: int = 2) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, q_len, 4, 3), (2, k_len, kv_heads, 3), (2, k_len, kv_heads, 2)]
    return [torch.randn(s, dtype=torch.float64, generator=draw) for s in shapes]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_dense_attention_is_torchs(kv_heads):
    q, k, v = inputs(kv_heads=kv_heads)
    mask = torch.ones(5, 7, dtype=torch.bool).tril(2)
    got, _ = dense_attention(q, k, v, mask, 0.4)
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    want = scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=0.4, enable_gqa=True)
    assert_same("out", got, want.transpose(1, 2))


def test_lse_and_gradients():
    q, k, v = (t.requires_grad_() for t in inputs())
    mask = torch.ones(5, 7, dtype=torch.bool).tril(2)
    mask[3] = False
    _, lse = dense_attention(q, k, v, mask, 0.4)
    score = 0.4 * (q[1, 2, 3] @ k[1, :5, 1].T)
    assert_same("lse of one row", lse[1, 3, 2], score.exp().sum().log())

    def outputs(*qkv):
        out, lse = dense_attention(*qkv, mask, 0.4)
        return out, lse[..., mask.any(-1)]

    assert torch.autograd.gradcheck(outputs, (q, k, v))


def test_rows_with_no_key():
    q, k, v = inputs()
    mask = torch.zeros(5, 7, dtype=torch.bool)
    mask[1, 2] = True
    out, lse, dq, dk, dv = dense_gradients(q, k, v, mask, 1.0, torch.ones(2, 5, 4, 2).double())
    lonely = torch.tensor([0, 2, 3, 4])
    assert (out[:, lonely] == 0).all() and (lse[..., lonely] == -INF).all()
    assert (dq[:, lonely] == 0).all() and (dk == 0).all()
    assert lse[..., 1].isfinite().all()
    # One key has weight 1 whatever its score, for each of the two heads that read it.
    assert_same("dv", dv[:, 2], torch.full((2, 2, 2), 2.0))
    assert dv.isfinite().all() and dq.isfinite().all()


def test_no_keys_at_all():
    q, k, v = inputs(k_len=0)
    out, lse = dense_attention(q, k, v, torch.zeros(5, 0, dtype=torch.bool), 1.0)
    assert out.shape == (2, 5, 4, 2) and (out == 0).all() and (lse == -INF).all()
