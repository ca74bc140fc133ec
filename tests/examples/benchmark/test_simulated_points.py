"""The simulator beside what was measured, and what it says of many hosts."""

from __future__ import annotations

import sys

import pytest
from benchmark.parts.planning import many_hosts, simulated_points

MISFITS = {
    "measured_here": 4,
    "medians_of_machines": 0,
    "measured_over_nccl": 2,
    "over_nccl_by_length": 3,
    "over_two_hosts": 3,
    "over_two_hosts_by_nvlink": 3,
    "published": 1,
}


@pytest.mark.parametrize(("points", "most"), MISFITS.items(), ids=MISFITS)
def test_points_are_within_15_percent_or_it_is_said_why(points: str, most: int) -> None:
    found = list(getattr(simulated_points, points)())
    off = [each for each in found if abs(each.misfit) > 15]
    assert all(each.why for each in off), off
    assert len(off) <= most


def test_a_table_of_hosts(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["", "--ranks", "8", "16", "--between", "50", "--draws", "1"])
    many_hosts.main()
    head, _, *lines = capsys.readouterr().out.strip().splitlines()
    assert "causal 64:8, 50 GB/s" in head and len(lines) == 2
    shares = [float(cell.strip(" %")) for cell in lines[0].replace("/", "|").split("|")[2:-1]]
    assert len(shares) == 8 and all(1 <= share <= 100 for share in shares)
