import json
import subprocess
import sys
from dataclasses import replace

import pytest

from customized_ops.ring_attention.__main__ import main
from customized_ops.ring_attention.command_line.plan_command import LAYOUTS, MASKS
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import make_plan
from customized_ops.ring_attention.core.plan.cost_model import CostModel
from customized_ops.ring_attention.core.report import report

# What each mask needs besides --tokens 1K; every known one has a line.
MASK_ARGUMENTS = {
    "full": "",
    "causal": "",
    "window": "--window 100",
    "varlen": "--documents 5",
    "streaming": "--window 64 --sink 4",
    "prefix_lm": "--prefix 100",
    "block_causal": "--block 64",
    "strided": "--stride 64 --window 32 --block 4",
    "global_local": "--window 16 --global-tokens 8",
    "star": "--block 128 --query 16",
}


def printed(capsys, arguments: str) -> str:
    main(["plan", *arguments.split()])
    return capsys.readouterr().out


def planned(mask: AttnMask, layout: Layout, **options) -> str:
    plan = make_plan(mask, layout, heads=(32, 8), **options)
    return report(plan, 32, 8, 128) + "\n"


def test_prints_the_report_of_the_plan(capsys):
    mask = AttnMask.dense(65536, causal=True)
    got = printed(
        capsys,
        "--mask causal --tokens 64K --ranks 8 --heads 16:4 --layout zigzag --head-dim 64 "
        "--v-dim 32 --itemsize 4 --assignment owner --stages 3 --team-size 2",
    )
    plan = make_plan(
        mask,
        Layout.zigzag(65536, 8),
        heads=(16, 4),
        assignment="owner",
        stages=3,
        team_size=2,
    )
    assert got == report(plan, 16, 4, 64, 32, 4) + "\n"
    got = printed(capsys, "--mask causal --tokens 64K --ranks 8 --head-groups 4")
    plan = make_plan(mask, Layout.contiguous(65536, 8), heads=(32, 8), head_groups=4)
    assert plan.head_groups == 4 and got == report(plan, 32, 8, 128) + "\n"


@pytest.mark.parametrize(
    ("arguments", "mask"),
    [
        ("", AttnMask.dense(1024, causal=True)),
        ("--mask full", AttnMask.dense(1024)),
        ("--mask window --window 100", AttnMask.dense(1024, window=(100, 0))),
        ("--mask window --window 1K,7", AttnMask.dense(1024, window=(1024, 7))),
        ("--mask varlen --documents 3", AttnMask.varlen([0, 341, 682, 1024], causal=True)),
        ("--mask varlen --documents 2 --no-causal", AttnMask.varlen([0, 512, 1024])),
        (
            "--mask varlen --cu-seqlens 0,5,1K --window 9",
            AttnMask.varlen([0, 5, 1024], causal=True, window=(9, 0)),
        ),
        (
            "--mask varlen --documents 1 --no-causal --window 9,3",
            AttnMask.varlen([0, 1024], window=(9, 3)),
        ),
    ],
)
def test_masks(capsys, arguments, mask):
    got = printed(capsys, f"--tokens 1K --ranks 4 {arguments}")
    assert got == planned(mask, Layout.contiguous(1024, 4))


@pytest.mark.parametrize("name", MASKS)
def test_every_mask_is_to_be_had(capsys, name):
    got = printed(capsys, f"--tokens 1K --ranks 4 --mask {name} {MASK_ARGUMENTS[name]}")
    assert got.startswith("mask      1024 queries x 1024 keys, ")


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_to_be_had(capsys, name):
    got = printed(capsys, f"--tokens 1K --ranks 4 --layout {name}")
    (line,) = (line for line in got.splitlines() if line.startswith("layout"))
    assert line.split()[0] == "layout" and len(line.split()) == 2


def test_layout_by_sizes(capsys):
    got = printed(capsys, "--tokens 1K --ranks 3 --layout 500,0,524")
    assert got == planned(AttnMask.dense(1024, causal=True), Layout.from_sizes([500, 0, 524]))


@pytest.mark.parametrize(
    ("text", "tokens", "cumulative"),
    [
        ("5\n7\n4\n", "", [0, 5, 12, 16]),
        ("5, 7,4", "", [0, 5, 12, 16]),
        ("5\n7\n4\n", "--tokens 14", [0, 5, 12, 14]),
        ("5\n7\n4\n", "--tokens 12", [0, 5, 12]),
    ],
)
def test_documents_of_a_file(capsys, tmp_path, text, tokens, cumulative):
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    got = printed(capsys, f"--mask varlen --documents-file {path} --ranks 2 {tokens}")
    mask = AttnMask.varlen(cumulative, causal=True)
    assert got == planned(mask, Layout.contiguous(cumulative[-1], 2))


def test_figures_of_hosts(capsys):
    """A full causal mask on 64 ranks: each host gets all that it lacks once, a rank few at once."""
    asked = "--tokens 512K --ranks 64 --layout zigzag --heads 64:8 --json"
    figures = json.loads(printed(capsys, f"{asked} --hosts 8"))
    assert (
        figures["tokens_into_host"] == figures["tokens_into_host_at_least"] == (512 << 10) * 7 / 8
    )
    assert figures["received_tokens_at_once"] <= 4 * 8192
    assert figures["received_bytes_at_once"] == figures["received_tokens_at_once"] * 8 * 2 * 256
    one_host = json.loads(printed(capsys, asked))
    assert one_host["tokens_into_host"] == 0
    assert one_host["received_tokens_at_once"] > 60 * 8192
    costs, mask = CostModel.over("8x8"), AttnMask.causal(512 << 10)
    plan = make_plan(mask, Layout.zigzag(512 << 10, 64), heads=(64, 8), costs=costs)
    for name in ("team_size", "head_groups", "n_stages", "blocks", "rounded"):
        assert figures[name] == getattr(plan, name)
    gathered = f"{asked} --hosts 8 --costs held_shards=inf"
    one_group = json.loads(printed(capsys, f"{gathered} --head-groups 1"))
    assert one_group["received_tokens_at_once"] > 60 * 8192
    no_bound = json.loads(printed(capsys, gathered))
    for name in ("forward_seconds", "backward_seconds"):
        assert figures[name] < 1.03 * no_bound[name]
        assert figures[name] < 1.05 * one_host[name]  # where nothing is copied to its place


def test_a_plan_over_hosts(capsys):
    text = printed(capsys, "--tokens 64K --ranks 8 --hosts 2 --layout zigzag")
    assert "hosts     2x4; 0.5 of all keys cross into the busiest, each once (at least 0.5)" in text
    assert "between hosts 50 GB/s, 48 us to start" in text


def test_documents_are_balanced_over_hosts(capsys):
    """Each of two documents stays on a host."""
    asked = "--mask varlen --cu-seqlens 0,32K,64K --ranks 8 --layout balanced --json --hosts"
    assert json.loads(printed(capsys, f"{asked} 2"))["tokens_into_host"] == 0
    assert json.loads(printed(capsys, f"{asked} 4"))["tokens_into_host"] > 0


def test_simulates(capsys):
    asked = "--tokens 64K --ranks 8 --hosts 2 --layout zigzag --heads 64:8 --simulate"
    text = printed(capsys, f"{asked} --costs between_bytes=25e9")
    costs = replace(CostModel.over("2x4"), between_bytes=25e9)
    mask, layout = AttnMask.causal(65536), Layout.zigzag(65536, 8)
    plan = make_plan(mask, layout, heads=(64, 8), costs=costs)
    slow = plan.simulate(64, 8, costs=costs)
    assert text == f"{slow}\n"
    figures = json.loads(printed(capsys, f"{asked} --json"))
    for name in ("forward_seconds", "backward_seconds"):
        assert figures[name] < figures[f"simulated_{name}"] <= getattr(slow, name)


def test_simulates_and_draws(capsys, tmp_path):
    path = tmp_path / "plan.svg"
    text = printed(capsys, f"--tokens 64K --ranks 70 --simulate --draw {path}")
    assert text.startswith("pass ")
    assert "forward pass as simulated, one rank in 2" in path.read_text()


def test_hosts_of_unlike_numbers_of_ranks(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--tokens", "64", "--ranks", "8", "--hosts", "3"])
    assert "--hosts 3 does not divide --ranks 8" in capsys.readouterr().err


def test_draws(capsys, tmp_path):
    path = tmp_path / "plan.svg"
    assert "imbalance" in printed(capsys, f"--tokens 1K --ranks 4 --draw {path}")
    assert "<svg" in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--mask nonsense", "invalid choice: 'nonsense'"),
        ("--mask window", "--mask window needs --window"),
        ("--mask causal --sink 3", "--mask causal takes no such option, not --sink"),
        ("--mask window --window 3 --sink 3", "--mask window takes --window, not --sink"),
        ("--mask window --window 1,2,3", "'1,2,3' is not LEFT or LEFT,RIGHT"),
        ("--mask varlen", "needs one of --documents, --cu-seqlens, --documents-file"),
        ("--mask varlen --documents 2 --cu-seqlens 0,1K", "needs one of --documents"),
        ("--mask varlen --documents 0", "--documents must be from 1 to 1024, got 0"),
        ("--mask varlen --cu-seqlens 0,5", "--cu-seqlens ends at 5, --tokens is 1024"),
        (
            "--mask varlen --cu-seqlens 0,2K,1K",
            "cu_seqlens_q[2] = 1024 is below cu_seqlens_q[1] = 2048",
        ),
        ("--mask varlen --documents-file nowhere.csv", "nowhere.csv"),
        ("--documents 3", "--documents is for --mask varlen, not --mask causal"),
        ("--layout nonsense", "--layout is contiguous, zigzag"),
        ("--layout 3,4", "--layout lists 2 sizes of 7 tokens in all, for 4 ranks and 1024"),
        ("--chunk 3", "--layout contiguous takes no such option, not --chunk"),
        ("--heads 5:2", "'5:2' is not Q:KV"),
        ("--heads 4:2:1", "'4:2:1' is not Q:KV"),
        ("--head-dim 0", "must be 1 or more, got 0"),
        ("--head-dim 1G", "'1G' is not a size"),
        ("--head-dim 1000M", "must be at most"),
        ("--team-size 3", "team_size must divide the 4 ranks"),
        ("--stages -1", "stages must be 0 or more, got -1"),
        ("--costs link_bytes=0", "--costs gives numbers above 0 for some of forward_flops"),
        (
            "--costs between_bytes=1e9",
            "has a rate between hosts, but there is one host (see --hosts)",
        ),
        ("--hosts 6x2", "--hosts 6x2 has 12 ranks, --ranks is 4"),
        (
            "--hosts many",
            "--hosts: hosts are given as 8x4 (hosts x ranks) or 4,4,2, not 'many'",
        ),
        ("--costs speed=3", "link_alone, between_alone, as link_bytes=2e9, not 'speed=3'"),
        ("--costs link_alone=2", "--costs has link_alone, which is of messages, but ranks of one"),
        (
            "--hosts 2 --costs link_alone=3",
            "--costs: link_alone of a CostModel must be 1 to 2, got 3.0",
        ),
        ("--draw plan.xyz", "xyz"),
        ("--draw /nowhere/plan.png", "/nowhere/plan.png"),
        ("--window", "expected one argument"),
        ("--sin 3", "unrecognized arguments"),
    ],
)
def test_what_does_not_fit_is_named(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_:
        main(["plan", "--tokens", "1K", "--ranks", "4", *arguments.split()])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("plan --ranks 4", "--mask causal needs --tokens"),
        ("plan --ranks 4 --mask varlen --documents 4", "--documents needs --tokens"),
        ("plan --tokens 4", "--ranks"),
        ("", "plan"),
    ],
)
def test_what_is_missing_is_named(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_:
        main(arguments.split())
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("text", "message"), [("5\nlong\n", "'long'"), ("5\n6\n", "11 tokens")])
def test_a_file_that_does_not_fit_is_named(capsys, tmp_path, text, message):
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(SystemExit):
        main(f"plan --mask varlen --documents-file {path} --ranks 2 --tokens 99".split())
    last = capsys.readouterr().err.splitlines()[-1]
    assert str(path) in last and message in last


@pytest.mark.slow
def test_runs_as_a_module():
    """As that of an installed wheel does in the quick suite."""
    command = [sys.executable, "-m", "customized_ops.ring_attention", "plan"]
    arguments = ["--tokens", "1M", "--ranks", "64", "--heads", "64:8", "--layout", "zigzag"]
    done = subprocess.run(
        [*command, *arguments], check=True, capture_output=True, text=True, timeout=300
    )
    assert "1048576 queries" in done.stdout and "imbalance" in done.stdout
