"""The benchmark at four ranks and more: its peers there, what a plan promises, runs made one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmark import attention
from benchmark.cases import Case, Maker
from benchmark.command import parse
from benchmark.compete.checking import WORST_ROW, tolerance
from benchmark.compete.contestants import contestants
from benchmark.compete.expected import LARGE, expected_seconds, for_one_gpu, is_long, refusal
from benchmark.compete.peers import te_cp, torch_cp
from benchmark.compete.rivals import RINGS, usp_layout, usp_refuses
from benchmark.contestant import Choice, zigzag
from benchmark.measure.account import Account, Watch
from benchmark.show.runs import read
from benchmark.show.tables import tables
from benchmark.show.text import above
from benchmark_launch import SCRIPT, launch, lines

from customized_ops.ring_attention.core.comm.one_sided.arena import Arena, Piece
from customized_ops.ring_attention.core.comm.pending import Counters

ARGS = parse(["--device", "cpu"])


def case(kind: str, tokens: int = 96, heads: tuple[int, int] = (8, 4), head_dim: int = 128) -> Case:
    return Maker(heads, head_dim, seed=3, document_multiple=8).of(kind, tokens)


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    """All peers are right, and planned bytes are those that ranks receive."""
    figures = tmp_path / "figures.jsonl"
    kinds = ["causal", "full", "packed", "packed_full"]
    launch(
        SCRIPT,
        *("--ranks", "4", "--suite", "scale", "--kinds", *kinds, "--heads", "8:4"),
        *("--tokens", "256", "--runs", "1", "--json", str(figures)),
        *("--without", "single plain", "seqshard c", "llama3_allgather 1"),
        ranks=False,
    )
    rows = lines(figures, "row")
    rings = ["zigzag_ring", "full_ring", "zigzag_varlen_ring", "full_ring"]
    for kind, ring in zip(kinds, rings, strict=True):
        own = {r["contestant"]: r for r in rows if r["kind"] == kind.replace("_", " ")}
        peers = {"single op auto", "seqshard", "llama3_allgather", "ulysses", "usp", ring}
        assert own.keys() == peers
        for row in own.values():
            assert row["note"] == ""
            assert row["checked"][0] < tolerance(torch.float32)
            assert row["checked"][1] < WORST_ROW
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
    te = te_cp.attention(None, "p2p", of.bounds, -1, of.packed, of.causal, q.device)  # type: ignore[arg-type]
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


def account(**given: Any) -> Account:
    rest = dict.fromkeys(["least", "received_all", "least_all", "pairs", "least_pairs"], 1)
    named = {"forward": 1.0, "backward": 2.0, "received": [30, 40], "imbalance": 1.0, **rest}
    return Account(**{**named, **given})


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
