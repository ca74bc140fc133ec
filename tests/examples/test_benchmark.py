"""The benchmark of attention over ranks, small: what it measures, and whom it does not believe."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmark.cases import HEADS, KINDS, SUITES, Case, K, Maker, chosen
from benchmark.command import parse
from benchmark.compete.checking import WORST_ROW, Sample, both_passes, largest, tolerance
from benchmark.compete.contestants import contestants
from benchmark.compete.expected import LONG_RUNS
from benchmark.compete.peers.kernels import KERNELS
from benchmark.compete.peers.scheme import attend, merged
from benchmark.compete.run import check_names
from benchmark.compete.trace import STEP, covered, summarize
from benchmark.contestant import Alone, Choice, whole_form
from benchmark.documents import LENGTHS, document_bounds
from benchmark.measure.timing import Marks, Runner, take_turns
from benchmark.show.plot import draw
from benchmark.show.rows import row_of
from benchmark.show.runs import read
from benchmark_launch import ROOT, SCRIPT, launch, lines
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


def is_fine(found: list[float]) -> bool:
    return found[0] < tolerance(torch.float32) and found[1] < WORST_ROW


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
    found = both_passes(lambda *t: attend(scheme, *t), shards)
    right = both_passes(lambda *t: wrap_masked_attn_func(*t, of.mask), shards)
    assert is_fine(errors(found, right))


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_rows_are_right_and_catch_what_is_wrong(kind: str) -> None:
    of = case(kind)
    q, k, v, dout = tensors(of)
    sample = Sample.of(of, (q, k, v, dout), ranks=2)
    shards = [*(t.requires_grad_() for t in (q, k, v)), dout]

    def off(attention: Any) -> bool:
        layout = Layout.contiguous(of.tokens, 1)
        return not is_fine(sample.errors(OneRank(), attention, shards, layout, 0))  # type: ignore[arg-type]

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


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["--tokens", "0"], "--tokens"),
        (["--heads", "32:7"], "32:7"),
        (["--plot", "x.png"], "--json"),
        (["--from-json", "x"], "--plot, --markdown"),
        (["--markdown"], "--markdown goes with --from-json"),
        (["--list"], "--list goes with --ranks"),
        (["--predict"], "--predict goes with --ranks"),
        (["--predict", "--ranks", "4", "--json", "x"], "--predict takes no --json"),
        (["--predict", "--ranks", "4", "--cuda-graph"], "--predict takes no --cuda-graph"),
        (["--predict", "--ranks", "4", "--runs", "3"], "--predict takes no --runs"),
        (["--from-json", "none.jsonl", "--markdown"], "there is no file none.jsonl"),
        (["--predict", "--ranks", "4", "--dtype", "float32"], "the rates of bfloat16"),
        (["--kinds", "oval"], "oval"),
    ],
)
def test_arguments_that_do_not_fit(
    given: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(given)
    assert names in capsys.readouterr().err


def test_a_contestant_that_there_is_not() -> None:
    args = parse(["--device", "cpu", "--contestants", "seqshard", "ulises"])
    with pytest.raises(SystemExit, match=r"--contestants: no .* with 'ulises': .*ulysses"):
        check_names(args, contestants(Choice(torch.device("cpu"))))


# A run with contestants that are wrong, each in its own way, beside the benchmark's own.
IMPOSTORS = """
import sys
sys.path[:0] = {paths!r}
from benchmark.command import parse
from benchmark.contestant import Choice, Contestant, contiguous
from benchmark.compete.contestants import ours
from benchmark.compete.run import run


def contestant(name, spoil):
    def make(case, ranks):
        right = ours(Choice(ranks.device))[1].make(case, ranks)
        return lambda q, k, v: spoil(right(q, k, v), q, k, v, ranks.rank)
    return Contestant(name, "none", make, contiguous)


def one_row(out, q, k, v, rank):
    out = out.clone()
    if rank == 1:
        out[0, 5] = out[0, 6]
    return out


def fails(out, q, k, v, rank):
    if rank == 1:  # after the forward has communicated, so the other one meets no partner
        raise RuntimeError("no luck")
    return out


run(parse(), [
    contestant("wrong gradient", lambda out, q, k, v, rank: out + 1e-2 * (k - k.detach()).sum()),
    contestant("wrong row", one_row),
    contestant("fails on one rank", fails),
    contestant("right", lambda out, q, k, v, rank: out),
])
"""


@pytest.mark.slow
def test_who_is_wrong_has_no_time(tmp_path: Path) -> None:
    script, figures = tmp_path / "impostors.py", tmp_path / "figures.jsonl"
    script.write_text(IMPOSTORS.format(paths=[str(ROOT), str(ROOT / "examples")]))
    arguments = ["--tokens", "64", "128", "--runs", "2", "--json", str(figures)]
    shown = launch(script, *arguments)
    rows = lines(figures, "row")
    wrong = {"wrong gradient": "WRONG", "wrong row": "WRONG", "fails on one rank": "failed: rank 1"}
    for tokens in (64, 128):  # a failure ends no run
        own = {r["contestant"]: r for r in rows if r["tokens"] == tokens}
        expected = {"seqshard", "seqshard contiguous", "single plain", "single op auto", "right"}
        expected |= {"zigzag_ring", "llama3_allgather", "llama3_allgather 1", "ulysses"}
        assert own.keys() == expected | wrong.keys()
        for name, row in own.items():
            if name in wrong:
                assert row["note"].startswith(wrong[name])
                assert row["both"] is None
            else:
                assert is_fine(row["checked"]), row
                assert row["both"] > 0
                assert row["share_both"] > 0
                assert row["runs"] == 2
    assert "no luck" in shown
    assert "| zigzag_ring" in shown
    assert "zigzag_varlen_ring (knows packed masks)" in shown
    assert "not measured: te p2p: needs a GPU" in shown


@pytest.mark.slow
def test_a_run_of_its_own(tmp_path: Path) -> None:
    """Packed documents, without torchrun, with a trace and a picture."""
    figures, picture = tmp_path / "figures.jsonl", tmp_path / "picture.png"
    pytest.importorskip("matplotlib")
    shown = launch(
        SCRIPT,
        *("--ranks", "2", "--suite", "packed", "--tokens", "512", "--runs", "1"),
        *("--json", str(figures), "--plot", str(picture), "--profile", str(tmp_path / "traces")),
        ranks=False,
    )
    rows = {r["contestant"]: r for r in lines(figures, "row")}
    assert {"seqshard", "zigzag_varlen_ring", "llama3_allgather", "ulysses"} < rows.keys()
    for row in rows.values():
        assert is_fine(row["checked"]), row
        assert row["both"] > 0
    assert rows["seqshard"]["new_ms"] is not None
    account = rows["seqshard"]["account"]
    assert account["plan_ms"] > 0
    assert account["counted"] == account["received"]
    assert "| plan of" in shown
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert len(list((tmp_path / "traces").glob("packed*seqshard.rank*.json"))) == 2
    assert "trace of seqshard, rank 1" in shown
    assert lines(figures, "run")[0]["versions"]["torch"] == torch.__version__
    picture.unlink()
    draw(read([figures]), picture)
    assert picture.is_file()


@pytest.mark.slow
def test_no_baseline_at_a_length_that_takes_too_long(tmp_path: Path) -> None:
    figures = tmp_path / "figures.jsonl"
    shown = launch(
        SCRIPT,
        *("--ranks", "2", "--tokens", "512", "--single-seconds", "1e-8", "--json", str(figures)),
        ranks=False,
    )
    (row,) = lines(figures, "row")
    assert row["contestant"] == "seqshard"
    assert row["share_both"] > 0
    assert row["runs"] == LONG_RUNS
    assert "from 128 tokens, 2:1 heads by FLOP" in shown
    assert "single plain (would take too long, or too much memory)" in shown
