"""The adapter of TransformerEngine's fused attention; on CPU over a dense stand-in for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import te_stand_in
import torch
from dense import assert_same, dense_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from windows import draw

from customized_ops.ring_attention.core.kernels import (
    BackwardOperands,
    ForwardOperands,
    Pairs,
    Request,
    Scoring,
)
from customized_ops.ring_attention.core.kernels.adapters import reference, te
from customized_ops.ring_attention.core.kernels.window.library_calls import LibraryCall, Packing
from customized_ops.ring_attention.core.kernels.window.lowering import Window
from customized_ops.ring_attention.core.mask.slices import as_slices, normalise, to_dense

WIDE = 999
SCALE = 0.3
SCORING = Scoring(SCALE)
# rows, keys, slices
SHAPES = {
    "full": (13, 17, [(0, 13, 0, 17, -WIDE, WIDE)]),
    "causal": (16, 16, [(0, 16, 0, 16, -WIDE, 0)]),
    "causal, more keys": (9, 17, [(0, 9, 0, 17, -WIDE, 8)]),
    "causal, more rows": (17, 9, [(0, 17, 0, 9, -WIDE, 0)]),
    "window": (16, 16, [(0, 16, 0, 16, -3, 2)]),
    "inverse causal": (12, 15, [(0, 12, 0, 15, 1, WIDE)]),
    "documents": (12, 12, [(0, 5, 0, 5, -WIDE, 0), (5, 6, 5, 6, 0, 0), (6, 12, 6, 12, -WIDE, 0)]),
    "rows twice": (12, 16, [(0, 12, 0, 4, -WIDE, WIDE), (2, 12, 4, 16, -WIDE, 2)]),
    "one pair": (3, 3, [(1, 2, 1, 2, 0, 0)]),
    "nothing": (5, 7, []),
}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library, computed densely."""
    te_stand_in.install(monkeypatch)


def tensors(
    rows: int, keys: int, *, dims: tuple[int, int] = (16, 8), dtype: Any = torch.float64
) -> Any:
    """q, k, v, dout and dlse of two batch entries, four heads of q and two of k."""
    return draw(2, rows, keys, 2, *dims, dtype=dtype)


def check(pairs: Pairs, given_lse: bool, dims: tuple[int, int] = (16, 8)) -> None:
    q, k, v, dout, dlse = tensors(pairs.q_len, pairs.k_len, dims=dims)
    mask = torch.from_numpy(to_dense(pairs.slices, pairs.q_len, pairs.k_len))
    asked = dlse if given_lse else None
    want = dense_gradients(q, k, v, mask, SCALE, dout, asked)
    got = te.forward(ForwardOperands(q, k, v), pairs, SCORING, None)
    given = BackwardOperands(dout, q, k, v, want[0], want[1].float(), asked)
    back = te.backward(given, pairs, SCORING, None)
    names = ("out", "lse", "dq", "dk", "dv")
    for name, a, b in zip(names, (*got, *back), want, strict=True):
        assert_same(name, a, b, 2e-6)


@pytest.mark.parametrize("given_lse", [False, True], ids=["", "dlse"])
@pytest.mark.parametrize("name", SHAPES)
def test_any_pairs(stand_in: None, name: str, given_lse: bool) -> None:
    rows, keys, slices = SHAPES[name]
    check(Pairs(normalise(as_slices(slices)), rows, keys), given_lse)


@pytest.mark.parametrize("dims", [(8, 16), (192, 128), (128, 192), (136, 128), (256, 256)])
def test_any_widths(stand_in: None, dims: tuple[int, int]) -> None:
    check(Pairs(as_slices([(0, 6, 0, 6, -5, 0)]), 6, 6), True, dims)


windows = st.tuples(st.integers(-1, 6), st.integers(-1, 6))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(windows, st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4))
def test_packed_calls_are_their_sequences_calls(
    window: Window, lengths: list[tuple[int, int]]
) -> None:
    """Only windows in which every row has a key: lowered slices leave no other."""
    lengths = [(min(a, b), max(a, b)) for a, b in lengths]
    with pytest.MonkeyPatch.context() as patch:
        te_stand_in.install(patch)
        rows, keys = (torch.tensor([0, *column]).cumsum(0) for column in zip(*lengths, strict=True))
        q, k, v, dout, dlse = (t[0] for t in tensors(int(rows[-1]), int(keys[-1])))
        most = (max(column) for column in zip(*lengths, strict=True))
        call = LibraryCall(window, Packing(rows.int(), keys.int(), *most))
        got = te.attend(ForwardOperands(q, k, v), call, SCORING)
        grads = te.attend_backward(
            BackwardOperands(dout, q, k, v, *got, dlse), call, SCORING, deterministic=True
        )
        for n in range(len(lengths)):
            i, j = (slice(cu[n], cu[n + 1]) for cu in (rows, keys))
            one = [t.unsqueeze(0) for t in (q[i], k[j], v[j], dout[i], dlse[:, i])]
            call = LibraryCall(window, None)
            alone = te.attend(ForwardOperands(*one[:3]), call, SCORING)
            given = BackwardOperands(one[3], *one[:3], *alone, one[4])
            alone_grads = te.attend_backward(given, call, SCORING, deterministic=True)
            here = got[0][i], got[1][:, i], grads[0][i], grads[1][j], grads[2][j]
            for name, a, b in zip(
                ("out", "lse", "dq", "dk", "dv"), here, (*alone, *alone_grads), strict=True
            ):
                assert_same(name, a, b[0], 1e-5)


def test_other_strides(stand_in: None) -> None:
    q, k, v, *_ = tensors(9, 9)
    pairs = Pairs(as_slices([(0, 9, 0, 9, -8, 0)]), 9, 9)
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    for a, b in zip(
        te.forward(ForwardOperands(*strided), pairs, SCORING, None),
        te.forward(ForwardOperands(q, k, v), pairs, SCORING, None),
        strict=True,
    ):
        assert_same("strided", a, b, 0.0)


def asked_of_backwards(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[tuple[Any, ...]]:
    """These arguments of all calls of the library's backward from now on."""
    asked = []

    def spy(**given: Any) -> Any:
        asked.append(tuple(given[name] for name in names))
        return te_stand_in.fused_attn_bwd(**given)

    te_stand_in.install(monkeypatch, fused_attn_bwd=spy)
    return asked


def test_deterministic_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asked_of_backwards(monkeypatch, "deterministic")
    q, k, v, dout, _ = tensors(6, 6)
    pairs = Pairs(as_slices([(0, 6, 0, 6, -5, 5)]), 6, 6)
    out, lse = te.forward(ForwardOperands(q, k, v), pairs, SCORING, None)
    for deterministic in (False, True):
        given = BackwardOperands(dout, q, k, v, out, lse)
        te.backward(given, pairs, SCORING, None, deterministic=deterministic)
    assert asked == [(False,), (True,)]


SQUARES = {"causal": "causal", "window": "no_mask", "documents": "padding_causal"}


@pytest.mark.parametrize("name", SHAPES)
def test_squares_have_their_diagonal_top_left(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """cuDNN's backward skips no tile where the diagonal is aligned bottom right."""
    asked = asked_of_backwards(monkeypatch, "attn_mask_type", "bottom_right_diagonal")
    rows, keys, slices = SHAPES[name]
    check(Pairs(normalise(as_slices(slices)), rows, keys), False)
    if name in SQUARES:
        assert set(asked) == {(SQUARES[name], False)}
    elif name not in ("one pair", "rows twice"):  # which have squares among others
        assert all(bottom_right for _, bottom_right in asked)


def test_a_window_back_is_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which lets cuDNN skip the tiles on both sides of it."""
    asked = asked_of_backwards(monkeypatch, "attn_mask_type", "window_size")
    check(Pairs(normalise(as_slices([(0, 16, 0, 16, -3, 0)])), 16, 16), False)
    check(Pairs(normalise(as_slices([(0, 9, 0, 16, 4, 7)])), 9, 16), False)
    assert asked == [("causal", (3, 0)), ("causal_bottom_right", (3, 0))]


def _raises() -> Callable[..., Any]:
    def undefined_symbol(*args: Any) -> Any:
        raise OSError("libcudnn.so.9: cannot open shared object file")

    return undefined_symbol


def test_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = te.missing.__wrapped__  # which asks each time
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert "pip install" in str(missing())
    modules = te_stand_in.install(monkeypatch)
    assert missing() is None
    utils = modules[".pytorch.utils"]
    monkeypatch.setattr(utils, "get_cudnn_version", lambda: (9, 10, 1))
    assert "cuDNN 9.10.1 is too old" in str(missing())
    te_stand_in.install(monkeypatch, fused_attn_fwd=lambda q, k, v, bottom_right_diagonal: None)
    assert "no o_format; 2.15 or newer" in str(missing())
    modules = te_stand_in.install(monkeypatch)
    monkeypatch.setattr(modules[".pytorch.utils"], "get_cudnn_version", _raises())
    assert "OSError: libcudnn" in str(missing())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "not torch.float32"),
        ({"features": ("softcap",)}, "no softcap"),
        ({"features": ("64-bit indices",)}, "no 64-bit indices"),
        ({"head_dim": 12}, "multiples of 8"),
        ({"v_dim": 264}, "up to 256 and 256"),
        ({"features": ("window", "lse gradient", "deterministic"), "head_dim": 192}, None),
    ],
)
def test_what_it_takes(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    given = {"dtype": torch.bfloat16, "head_dim": 64, "v_dim": 64, "q_heads": 4, "kv_heads": 2}
    said = te.CAPABILITIES[0].refuses(Request(torch.device("cuda", 0), **(given | changes)))
    assert said is None if reason is None else reason in str(said)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256), (64, 72)], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_on_a_gpu(name: str, dims: tuple[int, int]) -> None:
    """The library itself, each length times 24, in bf16 against the specification in fp32."""
    check_on_a_gpu(name, dims, 24)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_few_tokens_on_a_gpu(name: str) -> None:
    check_on_a_gpu(name, (64, 64), 1)


def check_on_a_gpu(name: str, dims: tuple[int, int], times: int) -> None:
    if te.missing():
        pytest.skip(te.missing() or "")
    rows, keys, slices = SHAPES[name]
    large = as_slices([[x * times for x in s] for s in slices])
    pairs = Pairs(normalise(large), rows * times, keys * times)
    q, k, v, dout, dlse = (
        t.cuda() for t in tensors(pairs.q_len, pairs.k_len, dims=dims, dtype=torch.bfloat16)
    )
    wide = [t.float() for t in (q, k, v)]
    out, lse = reference.forward(ForwardOperands(*wide), pairs, SCORING, None)
    kept = pairs, SCORING, None
    given = BackwardOperands(dout.float(), *wide, out, lse, dlse.float())
    want = reference.backward(given, *kept)
    given = BackwardOperands(dout, q, k, v, out.bfloat16(), lse, dlse.float())
    got = te.backward(given, *kept, deterministic=True)
    results = (*te.forward(ForwardOperands(q, k, v), pairs, SCORING, None), *got)
    for n, (a, b) in enumerate(zip(results, (out, lse, *want), strict=True)):
        size = b[b.isfinite()].abs().max().item() if b.numel() and b.isfinite().any() else 1.0
        assert_same(("out", "lse", "dq", "dk", "dv")[n], a.cpu(), b.cpu(), 0.02 * max(size, 1.0))
