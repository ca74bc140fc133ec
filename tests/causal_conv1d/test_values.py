"""The short convolution over ranks against the sum token by token."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from conv_cases import ConvCase, check, random_case

from customized_ops.along_sequence import segments_of
from customized_ops.causal_conv1d import wrap_causal_conv1d_func
from customized_ops.causal_conv1d.halo import received_tokens
from customized_ops.ring_attention import Layout, run_ranks


def run(case: ConvCase, ranks: int) -> None:
    check(case, case.in_process(ranks), case.expected())


@pytest.mark.parametrize("ranks", range(1, 9))
def test_one_sequence(ranks: int) -> None:
    """Over 8 ranks the halo of 3 tokens spans two ranks, and the last ones hold nothing."""
    for activation in (None, "silu"):
        run(ConvCase(12, activation=activation), ranks)


@pytest.mark.parametrize("layout", ["contiguous", "uneven", "zigzag", "balanced", "by document"])
def test_packed_documents(layout: str) -> None:
    """Shorter than the convolution, empty, and over several ranks."""
    case = ConvCase(batch=1, lengths=(1, 9, 0, 2, 1, 14, 0), layout=layout, activation="silu")
    for ranks in (2, 5):
        run(case, ranks)


@pytest.mark.parametrize("width", [1, 2, 9])
def test_widths(width: int) -> None:
    run(ConvCase(12, width=width, bias=False), 4)


def test_only_the_halo_moves() -> None:
    """As predicted, and as much for four times the tokens: forward, and there and back."""

    def rank(case: ConvCase, comm: Any) -> int:
        case.on_rank(comm, comm.rank, 4)
        return comm.counters.received_bytes

    for tokens in (24, 96):
        case = ConvCase(tokens, layout="zigzag")

        segments = segments_of(Layout.zigzag(tokens, 4), np.array([0, tokens]))
        halo = received_tokens(segments, 4)
        assert halo.tolist() == [3, 6, 6, 3]
        received, token_bytes = run_ranks(4, partial(rank, case)), 2 * 3 * 8
        sent_home = np.array([3, 6, 6, 3])  # to the rank whose tokens others fetched
        assert received == ((2 * halo + sent_home) * token_bytes).tolist()


def test_a_difference_is_found() -> None:
    case = ConvCase(6)
    expected = case.expected()
    for n in range(len(expected)):
        wrong = list(expected)
        wrong[n] = wrong[n] + 1e-8
        with pytest.raises(AssertionError, match="is off by"):
            check(case, wrong, expected)


def test_half_precision() -> None:
    x, weight = torch.randn(1, 9, 8).bfloat16(), torch.randn(8, 4)
    y = wrap_causal_conv1d_func(x, weight, activation="silu")
    truth = wrap_causal_conv1d_func(x.double(), weight.double(), activation="silu")
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, truth.bfloat16()) or (y - truth).abs().max() < 0.02


@pytest.mark.filterwarnings("ignore:Layout.balanced")
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(20, 1000, 20))]
)
def test_random_cases(first: int) -> None:
    """Twenty each."""
    for seed in range(first, first + 20):
        run(*random_case(seed))
