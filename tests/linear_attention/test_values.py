"""Linear attention over ranks against the recurrence token by token: values, states, gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from linear_cases import LinearCase, check, random_case

from customized_ops.linear_attention import wrap_gated_delta_rule_func
from customized_ops.linear_attention.kernels.torch_chunks import CHUNK, CHUNK_OF_CHANNELS
from customized_ops.ring_attention.fuzz import LinearAttentionCase, Trial

KINDS = [(delta, channels) for delta in (True, False) for channels in (True, False)]


def run(case: LinearCase, ranks: int) -> None:
    check(case, case.in_process(ranks), case.expected())


@pytest.mark.thin(2)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_one_sequence(ranks: int) -> None:
    """Over 7 and 8 ranks some hold nothing."""
    for n in (ranks % 4, 3 - ranks // 2 % 4):
        run(LinearCase(12, *KINDS[n], seed=n, layout="contiguous"), ranks)


@pytest.mark.parametrize("layout", ["contiguous", "uneven", "zigzag", "balanced", "by document"])
def test_packed_documents(layout: str) -> None:
    """Some empty, of a token, and over several ranks."""
    lengths = (1, 9, 0, 2, 1, 14, 0)
    for n, (delta, channels) in enumerate(KINDS):
        case = LinearCase(0, delta, channels, 1, lengths=lengths, layout=layout, seed=n)
        run(case, 2 + n)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("delta", "channels"), KINDS)
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_chunks(delta: bool, channels: bool, beyond: int) -> None:
    """Of one device and of ranks: a token less than two chunks, two, and one more."""
    tokens = 2 * (CHUNK_OF_CHANNELS if channels else CHUNK) + beyond
    case = LinearCase(tokens, delta, channels, batch=1, dims=(2, 3), layout="contiguous")
    expected = case.expected()
    for ranks in (1, 2):
        check(case, case.in_process(ranks), expected)


@pytest.mark.parametrize("decay", [0.0, 30.0, 3000.0])
def test_decays_from_none_to_all(decay: float) -> None:
    for delta, channels in KINDS:
        run(LinearCase(70, delta, channels, batch=1, decay=decay, layout="zigzag"), 2)


@pytest.mark.parametrize("seed", [2, 10, 14, 16])
def test_strong_decays_in_fp32(seed: int) -> None:
    """Over ranks as near to fp64 as on one device, whose sums of log decays are larger."""
    case = LinearAttentionCase(
        layout="ranges:;;0-22;22-48;",
        dtype=torch.float32,
        seed=seed,
        length=48,
        channels=True,
        dims=(1, 6),
        decay=30.0,
    )
    assert Trial(case, ranks=5).failure() == ""


def test_default_layouts() -> None:
    run(LinearCase(12, layout="default"), 3)
    run(LinearCase(0, batch=1, lengths=(3, 5, 2), layout="default"), 3)  # 4, 4 and 2 tokens


def test_fp32_is_near_fp64() -> None:
    case = LinearCase(200, batch=1, heads=(2, 2), dims=(8, 8), decay=0.1, states="")
    given = {name: t.detach() for name, t in case.given.items()}
    truth = wrap_gated_delta_rule_func(**given)
    low = wrap_gated_delta_rule_func(**{name: t.float() for name, t in given.items()})
    assert low.dtype == torch.float32
    assert (low - truth).abs().max() < 1e-5 * truth.abs().max()
    mixed = {name: t.bfloat16() if name in "qkv" else t.float() for name, t in given.items()}
    out = wrap_gated_delta_rule_func(**mixed)
    assert out.dtype == torch.bfloat16
    assert (out - truth).abs().max() < 0.05 * truth.abs().max()


def test_gradients_of_some_inputs_alone() -> None:
    case = LinearCase(9, states="both")
    given = {name: t.detach().clone() for name, t in case.given.items()}
    given["beta"].requires_grad_()
    out, _ = wrap_gated_delta_rule_func(**given, output_final_state=True)
    weights = case.weights([out])[0]
    (grad,) = torch.autograd.grad((out * weights).sum(), [given["beta"]])
    whole = case.given
    out, _ = wrap_gated_delta_rule_func(**whole, output_final_state=True)
    (expected,) = torch.autograd.grad((out * weights).sum(), [whole["beta"]])
    assert torch.equal(grad, expected)


def test_a_difference_is_found() -> None:
    case = LinearCase(6)
    expected = case.expected()
    for n in range(len(expected)):
        wrong = list(expected)
        wrong[n] = wrong[n] + 1e-8
        with pytest.raises(AssertionError, match="is off by"):
            check(case, wrong, expected)
    with pytest.raises(AssertionError, match="is off by"):  # not the same recurrence
        check(case, replace(case, layout="zigzag", decay=1.01).in_process(2), expected)


@pytest.mark.filterwarnings("ignore:Layout.balanced")
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(20, 1000, 20))]
)
def test_random_cases(first: int) -> None:
    """Twenty each: any layout, documents, states, decays, over up to 8 ranks."""
    for seed in range(first, first + 20):
        run(*random_case(seed))
