"""Calls in a row and one alone: shares of the ideal, and files of several runs made one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark.parts import two_protocols
from benchmark.parts.two_protocols import Times
from example_runs import run

ROUNDS = [Times(8.0, 5.0, 10.0, 0.5), Times(9.0, 6.0, 9.0, 0.9), Times(8.0, 4.0, 8.0, 0.6)]


def test_shares_are_of_one_device_over_the_ranks() -> None:
    found = two_protocols.shares(ROUNDS, 2)
    assert (found["row"], found["alone"], found["host"]) == (4 / 5, 4 / 9, 600.0)


def test_several_files_are_made_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = []
    for n, row in enumerate((0.5, 0.7, 0.6)):
        of_case: dict[str, Any] = {"row": row, "alone": 0.4, "host": 100.0, "draws": [row, 0.9]}
        paths.append(tmp_path / f"{n}.json")
        paths[-1].write_text(
            json.dumps({"machine": f"machine {n}", "cases": {"packed:1k": of_case}})
        )
    monkeypatch.setattr(sys, "argv", ["two_protocols", "--from-json", *map(str, paths)])
    two_protocols.main()
    printed = capsys.readouterr().out
    assert "machine 2" in printed and "row 60.0% (50.0% to 70.0%)" in printed
    assert "draws 50.0% to 90.0%" in printed


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    given = ["--device", "cpu", "--head-dim", "16", "--cases", "causal:1k:4:2", "packed:1k:4:2"]
    rest = ["--draws", "2", "--rounds", "1", "--json", str(out)]
    done = run("benchmark/parts/two_protocols.py", *given, *rest, torchrun=True)
    assert done.returncode == 0, done.stderr
    cases = json.loads(out.read_text())["cases"]
    assert set(cases) == {"causal:1k:4:2", "packed:1k:4:2"}
    assert len(cases["packed:1k:4:2"]["draws"]) == 2
    for found in cases.values():
        assert found["row"] > 0 and found["alone"] > 0 and found["host"] > 0
