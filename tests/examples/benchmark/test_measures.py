"""What the benchmark of attention compares, counts and times, small."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from benchmark.cases import HEADS, KINDS, SUITES, Case, K, Maker, chosen
from benchmark.command import parse
from benchmark.compete.checking import Sample, both_passes, is_fine, largest, tolerance
from benchmark.compete.contestants import contestants
from benchmark.compete.peers.kernels import KERNELS
from benchmark.compete.peers.scheme import merged
from benchmark.compete.trace import STEP, covered, summarize
from benchmark.contestant import Alone, Choice, whole_form
from benchmark.documents import LENGTHS, document_bounds
from benchmark.measure.timing import Marks, Runner, take_turns
from benchmark.show.rows import row_of
from hypothesis import given, settings
from hypothesis import strategies as st

from customized_ops.ring_attention import Layout, wrap_masked_attn_func


class OneRank:
    """What ``largest`` asks of the ranks."""

    def wait(self) -> None: ...

    def gather(self, value: Any) -> list[Any]:
        return json.loads(json.dumps([value]))


def errors(given: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> list[float]:
    return largest(OneRank(), given, right)  # type: ignore[arg-type]


def case(kind: str, tokens: int = 96) -> Case:
    return Maker((4, 2), 8, seed=3, document_multiple=8).of(kind, tokens)


def tensors(of: Case) -> list[torch.Tensor]:
    torch.manual_seed(0)
    (h, g), d = of.heads, of.head_dim
    return [torch.randn(1, of.tokens, heads, d) for heads in (h, g, g, h)]


@settings(deadline=None, derandomize=True, max_examples=15)
@given(
    tokens=st.integers(1, 1000),
    seed=st.integers(0, 99),
    multiple=st.sampled_from([1, 4, 16]),
)
def test_documents_fill_the_sequence(tokens: int, seed: int, multiple: int) -> None:
    total = tokens * multiple
    bounds = np.array(document_bounds(total, seed, multiple))
    lengths = np.diff(bounds)
    assert bounds[0] == 0
    assert bounds[-1] == total
    assert (lengths > 0).all()
    assert (lengths % multiple == 0).all()
    assert lengths.max() <= total // 4 + multiple
    assert tuple(bounds) == document_bounds(total, seed, multiple)


def test_documents_are_as_long_as_the_corpus() -> None:
    lengths = np.diff(document_bounds(1 << 22, seed=0))
    shortest, longest, count = np.array(LENGTHS).T
    share = [
        ((a <= lengths) & (lengths <= b)).mean() for a, b in zip(shortest, longest, strict=True)
    ]
    assert np.abs(np.array(share) - count / count.sum()).max() < 0.03


def test_tokens_that_no_multiple_fills() -> None:
    with pytest.raises(ValueError, match="multiple of 16, got 100"):
        document_bounds(100, 0, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_flop_count_the_pairs_of_the_mask(kind: str) -> None:
    of = case(kind, 64)
    assert of.forward_flop == 4 * of.mask.to_dense().sum() * 4 * 8
    assert of.flop == 3.5 * of.forward_flop
    assert of.make is not None
    assert of.make(32).tokens == 32
    assert of.make(32).kind == of.kind


def test_every_suite_has_cases() -> None:
    def of(*given: str) -> list[Case]:
        return chosen(parse(["--device", "cpu", "--tokens", "64", "--suite", *given]), ranks=4)

    for suite, pairs in SUITES.items():
        cases = of(suite)
        assert {c.tokens for c in cases} == {64}
        assert len(cases) >= len({kind for kind, _ in pairs})
    assert {c.heads for c in of("heads")} == set(HEADS)
    assert {c.heads for c in of("scale")} == {(64, 8), (32, 8)}
    assert [(c.kind, c.heads) for c in of("scale", "--kinds", "full", "--heads", "4:2")] == [
        ("full", (4, 2))
    ]


def test_lengths_that_grow_with_the_ranks() -> None:
    for ranks in (4, 8):
        given = parse(
            ["--device", "cpu", "--suite", "scale", "--kinds", "window", "--heads", "4:2"]
        )
        lengths = [c.tokens // K for c in chosen(given, ranks)]
        expected = [64, 8 * ranks, 256, 16, 1024]
        assert lengths == list(dict.fromkeys(expected))  # 8 ranks: 64k are there already


@pytest.mark.parametrize("kind", ["causal", "full", "packed", "packed_full", "window"])
def test_plain_kernel_is_the_op(kind: str) -> None:
    of = case(kind)
    q, k, v, dout = tensors(of)
    shards = [*(t.requires_grad_() for t in (q, k, v)), dout]
    scheme = Alone(KERNELS["plain"], whole_form(of, torch.device("cpu")))
    found = both_passes(scheme, shards)
    right = both_passes(lambda *t: wrap_masked_attn_func(*t, of.mask), shards)
    assert is_fine(errors(found, right), torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_rows_are_right_and_catch_what_is_wrong(kind: str) -> None:
    of = case(kind)
    q, k, v, dout = tensors(of)
    sample = Sample.of(of, (q, k, v, dout), ranks=2)
    shards = [*(t.requires_grad_() for t in (q, k, v)), dout]

    def off(attention: Any) -> bool:
        layout = Layout.contiguous(of.tokens, 1)
        found = sample.errors(OneRank(), attention, shards, layout, 0)  # type: ignore[arg-type]
        return not is_fine(found, torch.float32)

    assert not off(lambda *t: wrap_masked_attn_func(*t, of.mask))
    assert off(lambda *t: wrap_masked_attn_func(*t, of.mask) * 1.001)
    assert off(lambda *t: wrap_masked_attn_func(*t, of.mask, softmax_scale=0.3))
    assert off(lambda q, k, v: wrap_masked_attn_func(q, k.detach(), v, of.mask) + 0 * k.sum())


def test_comparison_can_fail() -> None:
    torch.manual_seed(0)
    right = torch.randn(1, 20_000, 2, 4)
    assert errors((right,), (right,)) == [0.0, 0.0]
    one_row = right.clone()
    one_row[0, 9_000] *= -1  # far below the tolerance of the norm in bf16
    small, row = errors((one_row,), (right,))
    assert small < tolerance(torch.bfloat16)
    assert row == pytest.approx(2, rel=0.2) or row > 1
    lost = right.clone()
    lost[0, 3, 0, 0] = torch.nan
    assert errors((lost,), (right,)) == [float("inf"), float("inf")]


def test_merged_parts_are_the_whole() -> None:
    q, k, v, _ = tensors(case("causal"))
    plain, form = KERNELS["plain"], whole_form(case("causal"), torch.device("cpu"))
    full = type(form)(causal=False)
    first, second = (
        plain.forward(q, k[:, s], v[:, s], full) for s in (slice(0, 30), slice(30, 96))
    )
    out, lse = merged(*first, *second)
    right_out, right_lse = plain.forward(q, k, v, full)
    torch.testing.assert_close(out, right_out)
    torch.testing.assert_close(lse, right_lse)


def test_summary_of_a_trace() -> None:
    def event(name: str, cat: str, start: float, duration: float) -> dict[str, Any]:
        return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": duration}

    found = summarize(
        [
            event("flash_fwd", "kernel", 0, 90),  # of the warm-up
            event(STEP, "user_annotation", 100, 5000),
            event("kernel_flash_attn_fwd_sm90", "kernel", 1000, 1000),
            event("ncclDevKernel_SendRecv", "kernel", 1500, 1000),  # 500 of it are exposed
            event("vectorized_elementwise_kernel", "kernel", 2600, 200),
            event("Memcpy PtoP", "gpu_memcpy", 2700, 50),
            event("aten::add", "cpu_op", 0, 9000),
        ]
    )
    assert found == pytest.approx(
        {
            "attention": 1.0,
            "other": 0.2,
            "copies": 1.05,
            "exposed copies": 0.5,
            "idle": 0.1,
            "device": 1.8,
            "kernels": 4,
        }
    )
    assert covered([(0, 2), (1, 3), (5, 6), (5, 5.5)]) == 4


def test_shares_of_the_ideal() -> None:
    everyone = contestants(Choice(torch.device("cpu")))
    names = [c.name for c in everyone]
    assert len(names) == len(set(names))
    of = case("causal")
    row = row_of(of, next(c for c in everyone if c.name == "seqshard"), torch.bfloat16, ranks=2)
    row.with_times([1.0, 3.0, 4.0])
    row.cycles = 8.0
    row.share({"forward": 0.5, "backward": 3.0, "both": 3.5, "cycles": 7.8})
    assert row.share_cycles == 0.975
    assert (row.share_forward, row.share_backward, row.share_both) == (0.5, 1.0, 0.875)
    assert row.tflops == pytest.approx(of.flop / 2 / 4e-3 / 1e12)
    assert row.tflops_forward == pytest.approx(of.forward_flop / 2 / 1e-3 / 1e12)
    assert row.tflops_backward == pytest.approx(2.5 * of.forward_flop / 2 / 3e-3 / 1e12)


class OneDevice(OneRank):
    """What taking turns asks of the ranks."""

    def __init__(self, device: str) -> None:
        self.device, self.cuda = torch.device(device), device == "cuda"

    def together(self) -> None: ...

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def turns(device: str, runs: int) -> tuple[list[str], list[Runner]]:
    """Who ran, in order, and all who did."""
    order: list[str] = []

    def runner(name: str) -> Runner:
        def step(mark: Marks) -> None:
            order.append(name)
            for _ in range(3):
                mark()
                torch.ones(1000, 1000, device=device).exp_()

        return Runner(name, step)

    runners = [runner(name) for name in "abcd"]
    take_turns(runners, OneDevice(device), runs, 0.1, iter)  # type: ignore[arg-type]
    return order, runners


def test_rounds_differ_and_ranks_agree_on_them() -> None:
    order, runners = turns("cpu", 12)
    rounds = [order[n : n + 4] for n in range(0, 48, 4)]
    assert all(sorted(each) == list("abcd") for each in rounds)
    before = {(a, b) for a, b in pairwise(order) if a != b}
    assert len(before) == 12  # everybody ran after everybody else
    assert turns("cpu", 12)[0] == order
    assert all(len(r.times) == 12 and r.clock(OneDevice("cpu")) is None for r in runners)  # type: ignore[arg-type]


def test_cycles_of_the_busiest_and_the_slowest_clock() -> None:
    class Two(OneRank):
        def gather(self, value: Any) -> list[Any]:
            return [value, [1500.0, 800.0]]

    runner = Runner("a", lambda mark: None, [[400.0, 600.0]] * 3, [1000.0, 2000.0, None])
    assert runner.clock(Two()) == (1500.0, 800.0)  # type: ignore[arg-type]
    runner.megahertz = [2000.0] * 3
    assert runner.clock(Two()) == (2000.0, 800.0)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_clock_of_a_gpu() -> None:
    _, runners = turns("cuda", 3)
    for runner in runners:
        cycles, megahertz = runner.clock(OneDevice("cuda"))  # type: ignore[arg-type, misc]
        assert 200 < megahertz < 4000
        assert cycles > 0
