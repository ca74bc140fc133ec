"""The command that tries random calls, and trials of ``parallelize``."""

from __future__ import annotations

import argparse
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from customized_ops.ring_attention.__main__ import main
from customized_ops.ring_attention.fuzz import Case, Trial, command, draw, engine

from .fuzz_cases import spoilt


def test_the_command_says_what_it_tried(capsys: pytest.CaptureFixture[str]) -> None:
    main(["fuzz", "--cases", "6", "--seed", "9"])
    assert "6 trials, seed 9: none failed" in capsys.readouterr().out


def test_the_command_tells_its_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fuzz", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for default in ("1000", "0", "all", "no limit"):
        assert f"(default: {default})" in said


def test_the_command_ends_with_1_and_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Case, "run_rank", spoilt(lambda case, ranks: ranks > 1))
    with pytest.raises(SystemExit) as ended:
        main(["fuzz", "--cases", "25", "--kind", "attention"])
    assert isinstance(ended.value.code, str)  # a message, which Python prints, and ends with 1
    assert "failed: dk: " in ended.value.code and "ranks=2)" in ended.value.code


def test_the_command_stops_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which drawing is a part; layers are tried as well before it is."""
    now, ran, right = [0.0], list[str](), draw.trial

    def drawn(*given: Any) -> Trial:
        now[0] += 3
        assert now[0] < 1000, "many more are drawn than there is time for"
        return right(*given)

    def failure(*given: Any) -> str:
        now[0] += 2
        ran.append(given[-1].policy)
        return ""

    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(draw, "trial", drawn)
    monkeypatch.setattr(Trial, "failure", failure)
    monkeypatch.setattr(engine.Engine, "failure", failure)
    options = argparse.Namespace(cases=1_000_000, seed=0, seconds=598.0, kind=["loss"])
    said = command.fuzz(options)
    # 118 calls of 5 s and two layers, whose drawing takes none here, of 2 s: then it is 594.
    assert said == "121 trials of 1,000,000: the time was over, seed 0: none failed"
    assert [n for n, policy in enumerate(ran) if policy] == [49, 99]
    now[0], options.seconds = 0.0, 0.0
    assert command.fuzz(options).startswith("1 trials of 1,000,000")


@pytest.mark.slow
def test_trials_of_parallelize() -> None:
    random = Random(6)
    trials = [draw.layer(random, 2) for _ in range(24)]
    assert {one.policy for one in trials} >= {"cp", "dp", "auto"}
    assert len({type(one.case) for one in trials}) == len(draw.LAYERS)
    assert list(engine.run(trials)) == [""] * 24
    refused = Trial(Case("ring", 8, heads=(1, 1)), 2, "ulysses")
    assert "PolicyError" in next(engine.run([refused]))
