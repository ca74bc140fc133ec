"""The benchmark at four ranks and more: its peers there, what a plan promises, runs made one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmark import attention
from benchmark.cases import Case, Maker
from benchmark.command import parse
from benchmark.compete.checking import is_fine
from benchmark.compete.contestants import contestants
from benchmark.compete.expected import LARGE, expected_seconds, for_one_gpu, is_long, refusal
from benchmark.compete.peers import te_cp, torch_cp
from benchmark.compete.rivals import RINGS, usp_layout, usp_refuses
from benchmark.contestant import Choice, zigzag
from example_runs import lines, measured

ARGS = parse(["--device", "cpu"])


def case(kind: str, tokens: int = 96, heads: tuple[int, int] = (8, 4), head_dim: int = 128) -> Case:
    return Maker(heads, head_dim, seed=3, document_multiple=8).of(kind, tokens)


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    """All peers are right, and planned bytes are those that ranks receive."""
    figures = tmp_path / "figures.jsonl"
    kinds = ["causal", "full", "packed", "packed_full"]
    measured(
        "benchmark/attention.py",
        *("--ranks", "4", "--suite", "scale", "--kinds", *kinds, "--heads", "8:4"),
        *("--tokens", "256", "--runs", "1", "--json", str(figures)),
        *("--without", "single plain", "seqshard c", "llama3_allgather 1"),
        torchrun=False,
    )
    rows = lines(figures, "row")
    rings = ["zigzag_ring", "full_ring", "zigzag_varlen_ring", "full_ring"]
    for kind, ring in zip(kinds, rings, strict=True):
        own = {r["contestant"]: r for r in rows if r["kind"] == kind.replace("_", " ")}
        peers = {"single op auto", "seqshard", "llama3_allgather", "ulysses", "usp", ring}
        assert own.keys() == peers
        for row in own.values():
            assert row["note"] == ""
            assert is_fine(row["checked"], torch.float32), row
            assert row["share_both"] > 0
        account = own["seqshard"]["account"]
        assert account["counted"] == account["received"]
        assert account["received"][0] >= account["least"]
        assert account["forward"] > 0


@pytest.mark.parametrize("kind", ["causal", "full", "packed", "packed_full"])
@pytest.mark.parametrize("ranks", [4, 8])
def test_usp_cuts_what_a_ring_holds(kind: str, ranks: int) -> None:
    of = case(kind, 1024)
    layout, rings, size = usp_layout(of, ranks), zigzag(of, RINGS), ranks // RINGS
    assert set(layout.sizes) == {1024 // ranks}
    for ring in range(RINGS):
        held = [layout.positions(ring * size + n) for n in range(size)]
        assert np.array_equal(np.concatenate(held), rings.positions(ring))


@pytest.mark.parametrize(
    ("kind", "ranks", "heads", "why"),
    [
        ("causal", 2, (8, 4), "wants 4 ranks or more, a multiple of 2"),
        ("causal", 8, (8, 2), "4 ranks do not divide"),
        ("window", 4, (8, 4), "knows causal, full, packed, packed full masks"),
    ],
)
def test_what_usp_refuses(kind: str, ranks: int, heads: tuple[int, int], why: str) -> None:
    assert why in (usp_refuses(case(kind, 1024, heads), ranks) or "")
    assert usp_refuses(case("causal", 1024), 4) is None


@pytest.mark.parametrize(
    ("kind", "mask", "window"),
    [
        ("causal", "causal", (-1, 0)),
        ("full", "no_mask", (-1, -1)),
        ("packed", "padding_causal", (-1, 0)),
        ("packed_full", "padding", (-1, -1)),
    ],
)
def test_masks_in_the_words_of_the_libraries(
    kind: str, mask: str, window: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def call(**given: Any) -> Any:
        asked.append(given)
        return given["q"]

    def ring(mesh: Any, q: Any, k: Any, v: Any, *, is_causal: bool) -> Any:
        asked.append({"causal": is_causal, "balance": library._cp_options.enable_load_balance})
        return q, None, *[None] * 6

    library = SimpleNamespace(
        attn_forward_func_with_cp=call,
        _scaled_dot_product_ring_cudnn_attention=ring,
        _cp_options=SimpleNamespace(enable_load_balance=None),
        set_rotate_method=lambda name: None,
    )
    for module in (te_cp, torch_cp):
        monkeypatch.setattr(module, "import_module", lambda name: library)
    monkeypatch.setattr(te_cp.torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(te_cp.dist, "get_process_group_ranks", lambda group: [0])
    monkeypatch.setattr(torch_cp, "DeviceMesh", SimpleNamespace(from_group=lambda *_: None))
    of = case(kind, 96)
    q = torch.zeros(1, 96, 8, 4)
    te = te_cp.attention(None, "p2p", of, q.device)  # type: ignore[arg-type]
    assert te(q, q, q).shape == q.shape
    assert (asked[0]["attn_mask_type"], asked[0]["window_size"]) == (mask, window)
    if not of.packed:
        torch_cp.TorchRing(None, "allgather", causal=of.causal).forward(q, q, q)  # type: ignore[arg-type]
        assert asked[1] == {"causal": of.causal, "balance": of.causal}


def test_one_gpu_attends_less_of_a_long_case() -> None:
    """Fewer heads first, then fewer tokens, but never other documents."""
    million = 1 << 20
    fewer = for_one_gpu(case("causal", 1 << 18, (64, 8)), ARGS)
    assert (fewer.tokens, fewer.heads) == (1 << 18, (8, 1))
    shorter = for_one_gpu(case("full", million, (64, 8)), ARGS)
    assert (shorter.tokens, shorter.heads) == (1 << 17, (8, 1))
    assert shorter.mask.area == shorter.tokens**2
    whole = case("packed", million, (64, 8))
    documents = for_one_gpu(whole, ARGS)
    assert (documents.bounds, documents.heads) == (whole.bounds, (16, 2))
    window = case("window", million, (64, 8))  # soon done, but too large
    assert is_long(window, ARGS)
    assert is_long(whole, ARGS)
    assert for_one_gpu(window, ARGS).heads == (32, 4)
    assert not is_long(case("window", million, (32, 8)), ARGS)
    one_head = for_one_gpu(case("packed", million, (64, 1)), ARGS)  # which nothing but tokens cuts
    assert one_head.tokens * 64 * 128 <= LARGE


def test_who_takes_part_and_for_how_long() -> None:
    everyone = contestants(Choice(torch.device("cuda")))
    short, long = (case("causal", n << 10, (64, 8)) for n in (64, 256))
    named = parse(["--device", "cpu", "--contestants", "seqshard", "ulysses"])

    def who(of: Case, args: Any) -> set[str]:
        return {c.name for c in everyone if refusal(of, c, args, 4) is None}

    assert {"single flash4", "seqshard", "ulysses", "usp"} < who(short, ARGS)
    assert who(long, ARGS) == {"seqshard"}
    assert {"seqshard", "ulysses"} < who(long, named)
    assert "single flash4" not in who(long, named)
    alone = short.flop / 600e12
    at_4, at_8 = (expected_seconds(short, everyone, ARGS, ranks) for ranks in (4, 8))
    assert 5 * alone < at_8 <= at_4 < 100
    assert expected_seconds(long, everyone, named, 4) > expected_seconds(long, everyone, ARGS, 4)


def test_list_of_cases(capsys: pytest.CaptureFixture[str]) -> None:
    attention.main(["--list", "--ranks", "8", "--suite", "scale", "--kinds", "window", "full"])
    shown = capsys.readouterr().out
    assert "| window 4096, 16k tokens, 32:8 heads" in shown
    assert "one GPU: 128k tokens, 8:1 heads" in shown


def test_predictions_need_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 16k tokens over 8 GPUs, window 4096: the first rank attends fewer pairs than the others,
    and all but it receive a shard and more of keys."""
    given = ["--predict", "--ranks", "8", "--tokens", "16k", "--heads", "64:8"]
    attention.main([*given, "--kinds", "causal", "window"])
    head, _, *lines = capsys.readouterr().out.splitlines()
    names = [cell.strip() for cell in head.strip("|").split("|")]
    rows = [
        dict(zip(names, (cell.strip() for cell in line.strip("|").split("|")), strict=True))
        for line in lines
    ]
    zigzag, contiguous, window = rows
    assert [row["contestant"] for row in rows] == ["seqshard", "seqshard contiguous", "seqshard"]
    assert zigzag["imbalance"] == "1.000"
    assert zigzag["pairs above least"] == "reached"
    assert zigzag["both"] == "100.0%"
    assert float(contiguous["received fwd MiB"]) > float(zigzag["received fwd MiB"])
    attended = np.minimum(np.arange(16 << 10), 4096) + 1
    busiest = attended.reshape(8, -1).sum(1).max() * 8 / attended.sum()
    assert float(window["imbalance"]) == pytest.approx(busiest, abs=1e-3)
    assert window["both"] == f"{100 / busiest:.1f}%"
    # Two shards of 2048 tokens, k and v, 8 heads of 128, 2 bytes.
    assert float(window["received fwd MiB"]) == 2 * 2048 * 2 * 8 * 128 * 2 / 2**20
    with pytest.raises(SystemExit, match="knows the plans of seqshard"):
        attention.main([*given, "--contestants", "te"])
