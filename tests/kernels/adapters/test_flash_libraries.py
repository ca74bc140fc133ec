"""FlashAttention libraries, through stand-ins with their signatures and their ways with windows."""

import functools
from types import SimpleNamespace

import pytest
import torch
from dense import assert_same, dense_gradients, worst
from flash_libraries import (
    flash2_standin,
    flash3_of_2_8_standin,
    flash3_standin,
    install,
    torch_standin,
)
from windows import KINDS, draw, pairs_of

from customized_ops.ring_attention.core.kernels import (
    BackwardOperands,
    ForwardOperands,
    Request,
    Scoring,
)
from customized_ops.ring_attention.core.kernels.adapters import reference, torch_flash, torch_ops
from customized_ops.ring_attention.core.kernels.adapters.flash_attn import flash2, flash3
from customized_ops.ring_attention.core.kernels.window.signatures import (
    call_by_name,
    lacking,
    required,
)
from customized_ops.ring_attention.core.mask.slices import to_dense

PLAIN, CAPPED = Scoring(0.35), Scoring(0.35, softcap=1.5)
over_kinds = pytest.mark.parametrize("kind", KINDS)


# The module, its stand-in, and how it can score.
LIBRARIES = {
    "torch": (torch_flash, torch_standin, PLAIN),
    "flash2": (flash2, flash2_standin, CAPPED),
    "flash3": (flash3, flash3_standin, CAPPED),
    "flash3 of 2.8": (flash3, flash3_of_2_8_standin, CAPPED),
}
over_libraries = pytest.mark.parametrize("name", LIBRARIES)


@pytest.fixture(autouse=True)
def nothing_remembered():
    """Whether a library is missing is asked once a process."""
    yield
    for kernel in (flash2, flash3):
        kernel.missing.cache_clear()


@pytest.mark.covering(1)
@over_libraries
@over_kinds
@pytest.mark.parametrize("widths", [(8, 8), (16, 8), (8, 24)], ids=str)
def test_values(name, kind, widths, monkeypatch):
    kernel, install_standin, scoring = LIBRARIES[name]
    standin = install_standin(monkeypatch)
    rows, keys, slices = KINDS[kind]
    pairs = pairs_of(slices, rows, keys)
    q, k, v, dout, dlse = draw(2, rows, keys, 2, *widths)
    want = reference.forward(ForwardOperands(q, k, v), pairs, scoring, None)
    got = kernel.forward(ForwardOperands(q, k, v), pairs, scoring, None)
    for what, mine, his in zip(("out", "lse"), got, want, strict=True):
        assert_same(what, mine, his)
    for given in (None, dlse):
        rows_ = (BackwardOperands(dout, q, k, v, *want, given), pairs, scoring, None)
        wanted = reference.backward(*rows_)
        standin.told.clear()
        gradients = kernel.backward(*rows_, deterministic=given is None)
        for what, mine, his in zip(("dq", "dk", "dv"), gradients, wanted, strict=True):
            assert_same(what, mine, his)
        assert all(told["deterministic"] == (given is None) for told in standin.told)
        assert bool(standin.told) == bool(slices)


@pytest.mark.parametrize("kernel", [flash2, flash3], ids=lambda kernel: kernel.NAME)
@pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError])
def test_missing(kernel, error, monkeypatch):
    def fails():
        raise error("undefined symbol")

    monkeypatch.setattr(kernel, "_library", fails)
    assert kernel.missing().startswith(f"{kernel.LIBRARY} cannot be imported (undefined symbol)")


@pytest.mark.parametrize("name", ["flash2", "flash3", "flash3 of 2.8"])
def test_nothing_missing(name, monkeypatch):
    kernel, install_standin, _ = LIBRARIES[name]
    install_standin(monkeypatch)
    assert kernel.missing() is None


def test_versions_that_are_too_old(monkeypatch):
    def of_2_5(q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes):
        """flash_attn 2.5."""

    install(monkeypatch, flash2.LIBRARY, _flash_attn_forward=of_2_5)
    assert flash2.missing() == (
        "the flash_attn installed has no return_softmax, window_size_left, window_size_right, "
        "softcap; it must be 2.7 or newer"
    )

    def of_2_7_0(q, k, v, softmax_scale, causal, window_size):
        """The hopper folder of 2.7.0."""

    install(monkeypatch, flash3.LIBRARY, _flash_attn_forward=of_2_7_0)
    assert "has no cu_seqlens_q, cu_seqlens_k" in flash3.missing()


@over_libraries
def test_what_they_refuse(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    kernel = LIBRARIES[name][0]
    able = kernel.CAPABILITIES if kernel is torch_flash else kernel.CAPABILITIES[0]
    request = functools.partial(
        Request, torch.device("cuda"), torch.bfloat16, q_heads=4, kv_heads=4
    )
    assert able.refuses(request(128, 128, features=able.features)) is None
    assert able.refuses(request(192, 128)) is None
    assert able.refuses(request(128, 128, features=("alibi",))) == "has no alibi"
    assert able.refuses(request(128, 128, features=("dropout",))) == "has no dropout"
    assert able.refuses(request(100, 100)).startswith("takes head dims that are multiples of 8")
    assert able.refuses(request(256, 128)) is None
    assert able.refuses(request(256, 256)) is None
    assert able.refuses(request(264, 256)).startswith("takes head dims of q and v up to")
    assert able.refuses(request(256, 248, features=("lse gradient",))) is None
    assert able.refuses(request(128, 256, features=("lse gradient",))) == (
        "takes a head dim of v up to 248 with lse gradient, not 256"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert able.refuses(request(128, 128)).startswith("needs compute capability")


def test_determinism_of_torch_is_switched_back(monkeypatch):
    torch_standin(monkeypatch)
    pairs = pairs_of([(0, 4, 0, 4, -9, 0)], 4, 4)
    q, k, v, dout, _ = draw(1, 4, 4, 2, 8, 8)
    results = torch_flash.forward(ForwardOperands(q, k, v), pairs, PLAIN, None)
    rows = (BackwardOperands(dout, q, k, v, *results), pairs, PLAIN, None)
    for mode in (1, 0):
        torch.set_deterministic_debug_mode(mode)
        torch_flash.backward(*rows, deterministic=True)
        assert torch.get_deterministic_debug_mode() == mode

    def fails(**_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        torch_flash.backward(*rows, deterministic=True)
    assert torch.get_deterministic_debug_mode() == 0


def test_torch_takes_what_the_device_has(monkeypatch):
    seen = []
    for module, name in ((torch_flash, "cuda"), (torch_ops.torch_sdpa, "cpu")):
        for part in ("forward", "backward"):
            monkeypatch.setattr(module, part, lambda *_, name=name, **__: seen.append(name))
    for device in ("cuda", "cpu"):
        q = SimpleNamespace(device=torch.device(device))
        torch_ops.forward(ForwardOperands(q, None, None), None, None, None)
        torch_ops.backward(BackwardOperands(None, q, *[None] * 4), *[None] * 3)
    assert seen == ["cuda", "cuda", "cpu", "cpu"]
    assert [able.device for able in torch_ops.CAPABILITIES] == ["cuda", "cpu"]


def test_parameters_of_functions_and_of_ops():
    def function(a, b, c=1):
        return a, b, c

    @torch.library.custom_op("seqshard_test::signatures", mutates_args=())
    def op(a: torch.Tensor, b: torch.Tensor | None, c: int = 1) -> torch.Tensor:
        assert b is None
        return a * c

    for each in (function, op):
        assert required(each) == {"a": True, "b": True, "c": False}
        assert lacking(each, ["c", "d", "a"]) == ["d"]
    assert call_by_name(function, a=5) == (5, None, 1)
    assert torch.equal(call_by_name(op, a=torch.ones(2), c=3), torch.full((2,), 3.0))


GPU_KERNELS = {"torch": torch_ops, "flash2": flash2, "flash3": flash3}


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_KERNELS)
@over_kinds
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (192, 128)], ids=str)
def test_on_a_gpu(name, kind, widths):
    """No worse than twice plain torch in bf16, plus rounding; and the same twice if it says so."""
    kernel = GPU_KERNELS[name]
    if kernel.missing():
        pytest.skip(kernel.missing())
    rows, keys, slices = KINDS[kind]
    scale = 50  # blocks of 128 in the middle, at the ends and at every edge
    big = [(a * scale, b * scale, c * scale, d * scale) for a, b, c, d, *_ in slices]
    bands = [tuple(max(-(10**6), min(10**6, x * scale)) for x in s[4:]) for s in slices]
    pairs = pairs_of(
        [(*s, *band) for s, band in zip(big, bands, strict=True)], rows * scale, keys * scale
    )
    exact = draw(2, rows * scale, keys * scale, 2, *widths, dtype=torch.bfloat16)
    mask = torch.from_numpy(to_dense(pairs.slices, pairs.q_len, pairs.k_len)).cuda()
    low = [t.cuda() for t in exact]
    q, k, v, dout, dlse = low[0], low[1], low[2], low[3], low[4].float()
    wide_q, wide_k, wide_v, wide_dout = (t.double() for t in (q, k, v, dout))
    how = mask, PLAIN.softmax_scale
    wants = dense_gradients(wide_q, wide_k, wide_v, *how, wide_dout, dlse)
    plains = dense_gradients(q, k, v, *how, dout, dlse)
    out, lse = kernel.forward(ForwardOperands(q, k, v), pairs, PLAIN, None)
    final = wants[0].to(q.dtype), wants[1].float()
    rest = (BackwardOperands(dout, q, k, v, *final, dlse), pairs, PLAIN, None)
    same = "deterministic" in kernel.CAPABILITIES[0].features
    got = kernel.backward(*rest, deterministic=same)
    names = ("out", "lse", "dq", "dk", "dv")
    for what, mine, want, his in zip(names, (out, lse, *got), wants, plains, strict=True):
        finite = want.isfinite()
        largest = want[finite].abs().max().item() if finite.any() else 0.0
        error = worst(his[finite], want[finite])
        assert_same(what, mine, want, 2 * error + torch.finfo(q.dtype).eps * largest)
    again = kernel.backward(*rest, deterministic=same)
    assert not same or all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
