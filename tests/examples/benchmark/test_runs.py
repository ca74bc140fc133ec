"""The benchmark of attention over ranks, small: what it measures, and whom it does not believe."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmark.command import parse
from benchmark.compete.checking import is_fine
from benchmark.compete.contestants import contestants
from benchmark.compete.expected import LONG_RUNS
from benchmark.compete.run import check_names
from benchmark.contestant import Choice
from benchmark.show.plot import draw
from benchmark.show.runs import read
from example_runs import EXAMPLES, ROOT, lines, measured


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
from benchmark.compete.checking import is_fine
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
    script.write_text(IMPOSTORS.format(paths=[str(ROOT), str(EXAMPLES)]))
    arguments = ["--tokens", "64", "128", "--runs", "2", "--json", str(figures)]
    shown = measured(script, *arguments)
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
                assert is_fine(row["checked"], torch.float32), row
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
    shown = measured(
        "benchmark/attention.py",
        *("--ranks", "2", "--suite", "packed", "--tokens", "512", "--runs", "1"),
        *("--json", str(figures), "--plot", str(picture), "--profile", str(tmp_path / "traces")),
        torchrun=False,
    )
    rows = {r["contestant"]: r for r in lines(figures, "row")}
    assert {"seqshard", "zigzag_varlen_ring", "llama3_allgather", "ulysses"} < rows.keys()
    for row in rows.values():
        assert is_fine(row["checked"], torch.float32), row
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
    shown = measured(
        "benchmark/attention.py",
        *("--ranks", "2", "--tokens", "512", "--single-seconds", "1e-8", "--json", str(figures)),
        torchrun=False,
    )
    (row,) = lines(figures, "row")
    assert row["contestant"] == "seqshard"
    assert row["share_both"] > 0
    assert row["runs"] == LONG_RUNS
    assert "from 128 tokens, 2:1 heads by FLOP" in shown
    assert "single plain (would take too long, or too much memory)" in shown
