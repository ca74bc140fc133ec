"""What the benchmark counts in a run, and tables and pictures of several runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark import attention
from benchmark.measure.account import Account, Watch
from benchmark.show.runs import read
from benchmark.show.tables import tables
from benchmark.show.text import above

from customized_ops.ring_attention.core.comm.one_sided.arena import Arena, Piece
from customized_ops.ring_attention.core.comm.pending import Counters


def account(**given: Any) -> Account:
    """An account of a run, with what is left out filled in."""
    rest = dict.fromkeys(["least", "received_all", "least_all", "pairs", "least_pairs"], 1)
    named = {"forward": 1.0, "backward": 2.0, "received": [30, 40], "imbalance": 1.0, **rest}
    return Account(**{**named, **given})


class Pushes:
    """What a watch asks of a Comm that pushes, and what that asks of its memory."""

    def __init__(self) -> None:
        self.counters, self._arena = Counters(received_bytes=100), Arena(self)  # type: ignore[arg-type]

    def allocate(self, n_bytes: int) -> Piece:
        return Piece([torch.empty(n_bytes, dtype=torch.uint8)], None)

    def capturing(self) -> bool:
        return False

    @property
    def arena_bytes(self) -> int:
        return self._arena.used_bytes

    def receive(self, *sizes: int) -> None:
        self._arena.begin()
        for size in sizes:
            self._arena.take(size)
            self.counters.received_bytes += size


class TwoRanks:
    """This one, and one that says half."""

    def gather(self, value: list[int]) -> list[list[int]]:
        return [value, [each // 2 for each in value]]


def test_what_is_counted_in_a_run() -> None:
    comm = Pushes()
    comm.receive(5000)  # by a pass before
    watch = Watch(False, comm)  # type: ignore[arg-type]
    watch()
    comm.receive(500)
    watch()
    comm.receive(500, 600)
    watch()
    found = account(alone_bytes=8000, shard_bytes=2000)
    found.saw(watch, TwoRanks())  # type: ignore[arg-type]
    assert found.counted == [500, 1100]
    assert found.arena_bytes == 512 + 768  # places are multiples of 256
    assert found.memory(8720) == 1.0
    found.input_bytes = 10_000
    assert found.memory(9720) == 1.05
    assert found.memory(None) is None
    assert len(watch.milliseconds()) == 2


def test_how_far_above_the_least() -> None:
    assert [above(*pair) for pair in ((3, 2), (2, 2), (0, 0), (1, 0), (70, 5))] == [
        *("+50.0%", "reached", "reached", "least 0", "over 10x")
    ]


def written(path: Path, share: float, **given: Any) -> Path:
    row = {
        **{"line": "row", "mask": "packed, 57 documents", "kind": "packed", "tokens": 65536},
        **{"q_heads": 64, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "ranks": 4},
        **{"contestant": "seqshard", "kernel": "auto", "whole": False, "layout": "balanced"},
        **{"forward": 2.0, "backward": 4.0, "both": 6.0, "peak_bytes": 5000, "new_ms": None},
        **{"tflops_forward": 600.0, "tflops_backward": 500.0, "tflops": 550.0},
        **{"share_forward": share, "share_backward": share, "share_both": share},
        "share_cycles": 0.985,
        "account": vars(account(alone_bytes=4000, plan_ms=3.0, pairs=110, least_pairs=100)),
    }
    peer = {**row, "contestant": "ulysses", "share_both": share - 0.5, "account": None}
    short = {**peer, "tokens": 16384}
    alone = {**row, "contestant": "single flash4", "whole": True}
    rows = [{"line": "run"}, {**row, **given}, peer, short, alone, {**row, "share_both": None}]
    path.write_text("\n".join(json.dumps(each) for each in rows))
    return path


def test_tables_of_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [written(tmp_path / f"{share}", share) for share in (0.97, 0.94, 0.95)]
    attention.main(["--markdown", "--from-json", *map(str, files)])
    shown = " ".join(capsys.readouterr().out.split())
    assert "4 ranks, bfloat16, head dim 128: medians of 3 runs" in shown
    assert "shares differ by up to 3.0 points" in shown
    assert "| packed, 64:8 heads | 16k | 64k |" in shown
    assert "| seqshard | – | 95% |" in shown
    assert "| ulysses | 45% | 45% |" in shown
    assert "single" not in shown
    assert "| 95% | 95% | 95% | 98.5% | 600, 500, 550 | 3, 3.0 points |" in shown
    assert "| -50% | -50% |" in shown  # predicted 1 and 2 ms, measured 2 and 4
    assert "| +10.0% | 1.000 | 3 | 1.25 |" in shown


def test_files_of_before_there_were_cycles(tmp_path: Path) -> None:
    """In whichever order, their rows count in all else."""
    new, old = written(tmp_path / "new", 0.9), tmp_path / "old"
    lines = map(json.loads, new.read_text().splitlines())
    kept = [{k: v for k, v in line.items() if k != "share_cycles"} for line in lines]
    old.write_text("\n".join(map(json.dumps, kept)))
    for files in ([old, new], [new, old]):
        own = [r for r in read(files) if r["contestant"] == "seqshard"]
        assert [(r["files"], r["share_both"], r["share_cycles"]) for r in own] == [(2, 0.9, 0.985)]


def test_runs_of_one_case_only_are_one(tmp_path: Path) -> None:
    files = [written(tmp_path / "a", 0.9), written(tmp_path / "b", 0.8, kernel="te")]
    own = [r for r in read(files) if r["contestant"] == "seqshard"]
    assert [(r["files"], r["share_both"], r["kernel"]) for r in own] == [
        *((1, 0.9, "auto"), (1, 0.8, "te"))
    ]
    assert "| seqshard te " in tables(read(files))
    assert "medians of 1 to 2 runs" in tables(read(files))


def test_predictions_have_a_panel(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    figures = written(tmp_path / "a", 0.9)
    heights = []
    for given in ({}, {"account": None}):
        source = written(figures, 0.9, **given)
        attention.main(["--from-json", str(source), "--plot", str(tmp_path / "a.png")])
        heights.append(imread(tmp_path / "a.png").shape[0])
    assert heights == [1500, 750]


def test_no_shares_to_show(tmp_path: Path) -> None:
    (tmp_path / "none").write_text('{"line": "run"}')
    with pytest.raises(SystemExit, match="none: no row with a share of the ideal"):
        read([tmp_path / "none"])
