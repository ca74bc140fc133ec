"""The helpers that other tests rely on: they must be right, and they must be able to fail."""

import itertools

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


@pytest.mark.parametrize("softcap", [0.3, 2.0])
def test_softcap_bounds_scores(softcap):
    q, k, v = inputs(kv_heads=4)
    mask = torch.eye(5, 7, dtype=torch.bool)  # one key a row: lse is its score
    _, lse = dense_attention(q, k, v, mask, 0.4, softcap=softcap)
    score = 0.4 * torch.einsum("bihd,bihd->bhi", q, k[:, :5])
    assert_same("score", lse, softcap * torch.tanh(score / softcap))


@pytest.mark.parametrize("positions", [None, torch.tensor([3, -4, 0, 1, 9, 2, 2])])
def test_alibi_is_an_additive_mask(positions):
    q, k, v = inputs(kv_heads=4)
    slopes = torch.tensor([[0.5, 0.3, 0.2, 0.1], [0.0, 0.7, 1.0, 2.0]], dtype=torch.float64)
    mask, given = torch.ones(5, 7, dtype=torch.bool), {"key_positions": positions}
    got, _ = dense_attention(q, k, v, mask, 0.4, alibi_slopes=slopes, **given)
    bias = torch.zeros(2, 4, 5, 7, dtype=torch.float64)
    for b, h, i, j in itertools.product(*map(range, bias.shape)):
        bias[b, h, i, j] = -slopes[b, h] * abs(i - (j if positions is None else positions[j]))
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    want = scaled_dot_product_attention(*heads_first, attn_mask=bias, scale=0.4)
    assert_same("out", got, want.transpose(1, 2))


def test_dropout_leaves_lse_and_the_mean():
    """Over all masks of four keys, each as likely, the mean is attention without dropout."""
    q, k, v = inputs(k_len=4)
    mask = torch.ones(5, 4, dtype=torch.bool)
    want = dense_attention(q, k, v, mask, 0.4)
    total = torch.zeros_like(want[0])
    for kept in itertools.product([False, True], repeat=4):
        keep = torch.tensor(kept).expand(2, 4, 5, 4)
        out, lse = dense_attention(q, k, v, mask, 0.4, keep=keep, dropout_p=0.5)
        assert_same("lse", lse, want[1])
        total += out / 16
    assert_same("mean", total, want[0])


def test_sink_is_a_key_without_a_value():
    q, k, v = inputs(kv_heads=4)
    sink = torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64)
    mask = torch.ones(5, 7, dtype=torch.bool).tril(1)
    mask[3] = False
    dout = torch.ones(2, 5, 4, 2).double()
    out, lse, dq, *_, dsink = dense_gradients(q, k, v, mask, 0.4, dout, sink=sink)
    plain_out, plain_lse = dense_attention(q, k, v, mask, 0.4)
    per_row = sink[None, :, None].expand_as(plain_lse)
    assert_same("lse", lse, torch.logaddexp(plain_lse, per_row))
    share = torch.exp(per_row - lse)  # of the row's sum, which the keys therefore lack
    assert_same("out", out, plain_out * (1 - share).transpose(1, 2).unsqueeze(-1))
    assert_same("dsink", dsink, -(share * out.sum(-1).transpose(1, 2)).sum((0, 2)))
    assert (out[:, 3] == 0).all() and (dq[:, 3] == 0).all()


def test_gradients_of_everything_at_once():
    tensors = [*inputs(), torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64)]
    keep = torch.rand(2, 4, 5, 7, generator=torch.Generator().manual_seed(0)) < 0.7
    slopes = torch.tensor([[0.5, 0.3, 0.2, 0.1]])
    mask = torch.ones(5, 7, dtype=torch.bool).tril(2)
    scoring = {"softcap": 1.2, "alibi_slopes": slopes, "keep": keep, "dropout_p": 0.3}

    def outputs(q, k, v, sink):
        return dense_attention(q, k, v, mask, 0.4, sink=sink, **scoring)

    assert torch.autograd.gradcheck(outputs, [t.requires_grad_() for t in tensors])
