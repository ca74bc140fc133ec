"""The example that plans and draws a mask given as text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from plans import plan_a_mask

from customized_ops.ring_attention import AttnMask


def test_what_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    png = tmp_path / "plan.png"
    arguments = ["prefix_lm(256, prefix=40)", "--layout", "balanced", "--ranks", "3"]
    assert plan_a_mask.main([*arguments, "--png", str(png)]) == 0
    said = capsys.readouterr().out
    assert "imbalance" in said and said.count("\nshown: ") == 2
    assert png.read_bytes().startswith(b"\x89PNG")


def test_the_mask_is_that_of_the_call() -> None:
    assert plan_a_mask.mask_of("streaming(32, 4, sink=2)") == AttnMask.streaming(32, 4, 2)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("__import__('os')", "is no call of a constructor of AttnMask"),
        ("shift(1)", "missing 2 required positional arguments"),
        ("causal(4, 8)", "is no mask of one sequence"),
        ("causal(", "was never closed"),
        ("causal(x)", "malformed"),
    ],
)
def test_what_is_no_mask(
    call: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        plan_a_mask.main([call, "--png", str(tmp_path / "plan.png")])
    assert re.search(says, capsys.readouterr().err)


def test_a_wrong_result_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_a_mask, "run", lambda plan: 1e-3)
    assert plan_a_mask.main(["causal(16)", "--png", str(tmp_path / "plan.png")]) == 1
