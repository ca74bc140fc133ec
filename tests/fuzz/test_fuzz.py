"""The fuzzer draws everything, finds what is planted, and makes it small."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from customized_ops.ring_attention import AttnMask
from customized_ops.ring_attention.__main__ import main
from customized_ops.ring_attention.fuzz import Case, Trial, command, draw, engine, trial
from customized_ops.ring_attention.fuzz.shrink import shrunk

MADE_OTHERWISE = {"dense", "from_slices", "shift", "restrict"}  # by other ops, or in "union"


def test_every_constructor_of_masks_is_drawn() -> None:
    makers = {
        name
        for name, member in inspect.getmembers(AttnMask, callable)
        if not name.startswith("_")
        and inspect.signature(member).return_annotation in ("AttnMask", "Self")
    }
    assert makers - MADE_OTHERWISE == set(draw.MASKS)


def test_a_seed_draws_the_same_trials_and_all_kinds_of_them() -> None:
    first, second = Random(3), Random(3)
    trials = [draw.trial(first) for _ in range(200)]
    assert [str(one) for one in trials] == [str(draw.trial(second)) for _ in range(200)]
    assert {one.case.op for one in trials} == set(draw.CASES)
    assert {one.ranks for one in trials} == {*range(1, draw.MOST_RANKS + 1)}
    kinds = {one.case.layout.partition(":")[0] for one in trials if one.case.layout}
    assert kinds >= {"contiguous", "zigzag", "striped", "sizes", "ranges", "chunks"}


def test_a_trial_prints_as_the_expression_that_makes_it() -> None:
    random = Random(4)
    names = {"torch": torch, "AttnMask": AttnMask, "Case": Case, "Trial": Trial}
    for _ in range(50):
        one = draw.trial(random)
        assert eval(str(one), names) == one


def spoilt(condition: Callable[[Case, int], bool]) -> Callable[..., Any]:
    """``run_rank`` with dk off by 1e-6 where a condition holds of the case and the ranks."""
    right = trial.run_rank

    def run_rank(case: Case, rank: int, ranks: int, group: Any) -> list[torch.Tensor]:
        results = right(case, rank, ranks, group)
        if condition(case, ranks):
            results[3] = results[3] + 1e-6
        return results

    return run_rank


def test_what_is_planted_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = spoilt(lambda case, ranks: case.packed and ranks > 2 and case.sink)
    monkeypatch.setattr(trial, "run_rank", planted)
    random = Random(5)
    failing = next(
        (one, failure)
        for one in (draw.trial(random) for _ in range(300))
        if one.case.dtype == torch.float64 and (failure := one.failure())
    )
    small, failure = shrunk(*failing)
    assert failure.startswith("dk: error 1.0")
    assert small.ranks == 3 and small.case.sink and small.case.length <= 2
    assert (small.case.heads, small.case.layout, small.case.options) == ((1, 1), None, ())
    script: dict[str, Any] = {"__name__": "__main__"}
    with pytest.raises(SystemExit, match=r"dk: error 1\.0"):
        exec(small.script(failure), script)


def test_an_error_is_a_failure() -> None:
    assert Trial(Case("ring", 8, sizes=(3, 5), options=(("kernel", "flash4"),)), 2).failure()
    assert not Trial(Case("ring", 8), 2).failure()


def test_the_command_says_what_it_tried(capsys: pytest.CaptureFixture[str]) -> None:
    main(["fuzz", "--cases", "25", "--seed", "9"])
    assert "25 trials, seed 9: none failed" in capsys.readouterr().out


def test_the_command_ends_with_1_and_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "run_rank", spoilt(lambda case, ranks: ranks > 1))
    with pytest.raises(SystemExit) as ended:
        main(["fuzz", "--cases", "25"])
    assert isinstance(ended.value.code, str)  # a message, which Python prints, and ends with 1
    assert "failed: dk: " in ended.value.code and "ranks=2)" in ended.value.code


def test_the_command_stops_when_its_time_is_over() -> None:
    options = argparse.Namespace(cases=49, seed=0, seconds=0.0)
    assert command.fuzz(options) == "1 trials of 49: the time was over, seed 0: none failed"


@pytest.mark.slow
def test_trials_of_parallelize() -> None:
    random = Random(6)
    trials = [draw.trial(random, 2) for _ in range(12)]
    assert {one.policy for one in trials} >= {"cp", "auto"}
    assert list(engine.run(trials)) == [""] * 12
    refused = Trial(Case("ring", 8, heads=(1, 1)), 2, "ulysses")
    assert "PolicyError" in next(engine.run([refused]))
