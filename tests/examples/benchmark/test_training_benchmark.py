"""The benchmark of training, small, on CPUs: who trains, trains the same."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from benchmark import packed_training, training
from example_runs import run
from shared.llama import Llama, LlamaConfig

SMALL = "--device cpu --dtype float32 --tokens 64 --layers 1 --dim 32 --heads 4:2 --hidden 48"
ALIKE = ("parallelize", "parallelize eager DTensor", "FSDP2 + wrap_zigzag_attn_func", "FSDP2")


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [False, True])
def test_all_start_from_one_loss(tmp_path: Path, checkpoint: bool) -> None:
    file = tmp_path / "rows.jsonl"
    options = [*SMALL.split(), "--ranks", "2", "--vocab", "300", "--rounds", "1", "--steps", "2"]
    options += ["--checkpoint"] * checkpoint
    options += ["--json", str(file), "--contestants", *ALIKE]
    done = run("benchmark/training.py", *options)
    assert done.returncode == 0, done.stderr
    rows = {row["contestant"]: row for row in map(json.loads, file.read_text().splitlines())}
    assert set(rows) == set(ALIKE), done.stdout
    first = {name: row["losses"][0] for name, row in rows.items()}
    assert max(first.values()) - min(first.values()) < 1e-5
    last = [rows[name]["losses"][1] for name in ALIKE[:3]]  # FSDP2 has more text a step
    assert max(last) - min(last) < 1e-4 and last[0] < first["FSDP2"]
    assert all(name in done.stdout.splitlines()[-n] for n, name in enumerate(ALIKE[::-1], 1))


@pytest.mark.slow
def test_packed_documents_by_three_routes() -> None:
    """The command compares their first losses."""
    options = ["--ranks", "2", "--vocab", "300", "--rounds", "1", "--batches", "2"]
    small = SMALL.replace("64", "256").split()
    done = run("benchmark/packed_training.py", *small, *options)
    assert done.returncode == 0, done.stderr
    table = done.stdout.splitlines()[-3:]
    assert [line.split("|")[1].strip() for line in table] == list(packed_training.ROUTES)


def test_flop_are_those_of_the_parameters_and_the_pairs() -> None:
    """All matrices but the embedding, which is the head, once; attended pairs."""
    config = LlamaConfig(dim=32, layers=3, heads=4, kv_heads=2, hidden=48, vocab=300)
    matrices = sum(p.numel() for p in Llama(config).parameters() if p.ndim == 2)
    tokens = 64
    pairs = sum(range(1, tokens + 1))
    assert math.isclose(
        training.flop(config, tokens), 6 * matrices * tokens + 12 * 3 * pairs * 4 * 8
    )
