"""The benchmark of kernels, as far as a CPU goes."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from types import ModuleType

import kernel_speed_jobs
import pytest
import torch
from example_runs import EXAMPLES, run

SCRIPT = EXAMPLES / "benchmark/parts/kernel_speed.py"


@pytest.fixture
def kernel_speed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("kernel_speed")


@pytest.mark.slow
def test_measures_every_mask_and_says_what_it_did_not(tmp_path: Path) -> None:
    told = tmp_path / "speed.json"
    options = "--device cpu --kernels torch reference --tokens 64 --heads 4 2"
    options += " --head-dim 16 --dtype float32 --runs 3 --json"
    done = run(SCRIPT, *options.split(), str(told))
    assert done.returncode == 0, done.stderr
    first, *rows = map(json.loads, told.read_text().splitlines())
    assert first["arguments"]["tokens"] == [64] and "torch" in first["versions"]
    assert [(r["mask"], r["kernel"]) for r in rows] == [
        (mask, kernel)
        for mask in (
            *("causal", "packed, 1 document", "prefix-LM, 1 document", "block-causal 512"),
        )
        for kernel in ("torch", "reference")
    ]
    assert all(r["forward"] > 0 and r["backward"] > 0 for r in rows)
    assert rows[0]["pairs"] == 64 * 65 // 2
    assert rows[0]["raw_forward"] > 0 and rows[0]["raw_backward"] > 0
    assert rows[0]["op"] > 0 and rows[0]["raw_op"] > 0 and rows[1]["raw_op"] is None
    assert rows[2]["raw_forward"] is None
    assert rows[2]["notes"] == ["raw call: the library has no single call for this"]
    table, notes, ops = done.stdout.split("\n\n")[1:]
    assert all(line.startswith("| ") or set(line) == {"|", "-"} for line in table.splitlines())
    assert notes == "- [1] torch: raw call: the library has no single call for this"
    assert [line.split(" | ")[:2] for line in ops.splitlines()[2:]] == [
        ["| torch", "64"],
        ["| reference", "64"],
    ]
    assert "[1] torch: raw call: the library has no single call for this\n" in done.stderr


def test_starts_nothing_after_its_time(
    kernel_speed: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--device cpu --kernels torch --tokens 64 --seconds 0"
    kernel_speed.main(options.split())
    assert "torch: not measured: 0 s were over" in capsys.readouterr().out


@pytest.mark.slow
def test_a_crash_costs_the_rest_of_a_kernel_alone(
    kernel_speed: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_speed, "Bench", kernel_speed_jobs.Troubled)
    options = "--device cpu --kernels torch cudnn reference --tokens 64"
    kernel_speed.main(options.split())
    done = capsys.readouterr().out.splitlines()
    lines = [line.split(" | ") for line in done if line.startswith("| ") and "64" in line]
    assert [(cells[2], cells[3], cells[-1]) for cells in lines] == [
        *((kernel, "100", " |") for kernel in ("torch", "cudnn", "reference")),
        *(("torch", "", "[1] |"), ("cudnn", "", "[2] |")),
        ("reference", "200", " |"),
        *(("torch", "", "[1] |"), ("cudnn", "", "[2] |")),
        ("reference", "300", " |"),
        *(("torch", "", "[1] |"), ("cudnn", "", "[2] |")),
        ("reference", "400", " |"),
    ]
    assert done[-2:] == [
        "- [1] torch: no figures from here on: its process died, exit code -9",
        "- [2] cudnn: no figures from here on: RuntimeError: an illegal memory access was "
        "encountered",
    ]


@pytest.mark.slow
def test_what_takes_long_is_left_out(
    kernel_speed: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_speed, "Bench", kernel_speed_jobs.Slow)
    options = "--device cpu --kernels torch --tokens 512 64 --masks causal"
    kernel_speed.main(options.split())
    told, errors = capfd.readouterr()
    rows = [line for line in told.splitlines() if line.startswith("| causal |")]
    assert rows[0].startswith("| causal | 64 | torch | 0.001 |  |  | 0.001 |")
    assert rows[1:] == ["| causal | 512 | torch |  |  |  |  |  |  | [1] |"]
    # 4 x 32 heads x 128 x 513 x 256 FLOP forward, 2.5 times that backward, at 10^9 a second.
    assert "- [1] torch: left out: a forward and backward would take about 7.5 s" in told
    assert "compiling" not in told and "compiling" in errors


def test_the_op_is_measured_at_any_length(kernel_speed: ModuleType) -> None:
    def measured(options: str) -> tuple[int, list[tuple[str, int]]]:
        args = kernel_speed.parse(["--device", "cpu", *options.split()])
        return args.op_tokens, [(mask.name, mask.tokens) for mask in kernel_speed.chosen(args)]

    two = [("causal", 64), ("causal", 9000)]
    assert measured("--tokens 9000 64 --masks causal") == (64, two)
    assert measured("--tokens 9000 --masks causal") == (9000, two[1:])
    assert measured("--tokens 9000 --masks causal --op-tokens 64") == (64, two)
    rest = [("block-causal 512", 64)]
    assert measured("--tokens 64 --masks block") == (64, rest)
    assert measured("--tokens 64 --op-tokens 32 --masks block causal") == (
        32,
        [("causal", 32), ("causal", 64), *rest],
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "no CUDA device; --device cpu --tokens 512 tries it out on this machine"),
        ("--device cuda", "no CUDA device; --device cpu --tokens 512 tries it out on"),
        ("--device cpu --speeds", "--speeds: the table is of GPUs"),
        (
            "--device cpu --tokens 2048 --masks causal cauzal",
            "--masks: none starts with 'cauzal'; there are causal, packed, window 1024, "
            "prefix-LM, random blocks 128, block-causal 512\n",
        ),
        ("--device cpu --masks packed --op-tokens 64", "--op-tokens: the op is measured with"),
        ("--device cpu --json no_such/x.jsonl", "--json: there is no folder no_such\n"),
        ("--device cpu --json .", "Is a directory"),
        ("--device cpu --tokens 0", "0 is not positive"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(
    kernel_speed: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: str,
    message: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as left:
        kernel_speed.main(options.split())
    assert left.value.code == 2
    told, errors = capsys.readouterr()
    assert not told and message in errors


def test_what_is_compared_takes_turns(kernel_speed: ModuleType) -> None:
    clock, calls = kernel_speed.Clock("cpu", 4), []
    times = clock.seconds(lambda: calls.append("a"), lambda: calls.append("b"))
    assert len(times) == 2 and min(times) > 0
    assert "".join(calls) == "abab" + "baabbaab"


def test_speeds_are_never_zero(kernel_speed: ModuleType) -> None:
    mask = kernel_speed.masks(64, 0)[0]
    row = mask.row("flex")
    row.forward, row.backward = 612.7, 0.01234
    assert kernel_speed.speeds([row, mask.row("te")]) == {"flex": {"causal": {64: (613, 0.0123)}}}


@pytest.mark.parametrize("set_by_user", [None, "/somewhere"])
def test_what_flash4_compiles_is_of_this_run_unless_told_otherwise(
    kernel_speed: ModuleType, monkeypatch: pytest.MonkeyPatch, set_by_user: str | None
) -> None:
    name = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
    for variable in (name, "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"):
        monkeypatch.setenv(variable, "0")  # so that it is put back
    monkeypatch.setenv(name, set_by_user) if set_by_user else monkeypatch.delenv(name)
    seen: list[str | None] = []

    def look(*args: object) -> None:
        worker = kernel_speed.Worker(kernel_speed_jobs.Environment)
        seen.extend(worker.ask(n, 60) for n in (name, "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"))
        worker.close()
        assert set_by_user or Path(str(seen[0])).is_dir()

    monkeypatch.setattr(kernel_speed, "measure", look)
    kernel_speed.main(["--device", "cpu", "--tokens", "64"])
    assert seen == ([set_by_user, "0"] if set_by_user else [os.environ[name], "1"])
    assert set_by_user or not Path(str(seen[0])).exists()


def test_what_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    own_process = importlib.import_module("own_process")
    worker = own_process.Worker(kernel_speed_jobs.Sleeper)
    assert worker.ask(0, 60) == 0
    for _ in range(2):
        with pytest.raises(own_process.Lost, match=r"^no answer in 0 s$"):
            worker.ask(60, 0.2)
