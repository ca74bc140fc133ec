"""The examples that run on ranks: what each shows is so, and where it is not they fail."""

from __future__ import annotations

import re
import runpy
import sys

import example_jobs
import nnscaler_llama
import pytest
import torch
from example_runs import EXAMPLES, run
from ranks import Pool, worlds

SLOTS = "customized_ops.ring_attention.api.frameworks"
TRAINED = ["losses are those of one process", "so are the weights after the last step"]


def shown(ranks: Pool, name: str, *arguments: str) -> list[str]:
    """The claims that rank 0 prints, of which none may fail on any rank."""
    replies = ranks.run(example_jobs.run, name, arguments)
    assert all(failed == 0 for failed, _ in replies), replies[0][1]
    lines = replies[0][1].splitlines()
    return [line.split(": ")[1].split(" (")[0] for line in lines if line.startswith("shown: ")]


@worlds(cpus=[2, 4])
def test_video_block_mask(ranks: Pool) -> None:
    assert shown(ranks, "video_block_mask") == [
        "out and gradients over ranks as of dense attention",
        "the balanced layout evens the work out",
    ]


@worlds(cpus=[4])
def test_videos_of_fewer_tokens_than_ranks(ranks: Pool) -> None:
    """Which nothing evens out further."""
    sizes = ["--frames", "1", "--height", "1", "--width", "1", "--chunks", "1", "1"]
    assert len(shown(ranks, "video_block_mask", *sizes)) == 2


@pytest.mark.parametrize(("prompt", "new"), [("61", "5"), ("3", "6")])
@worlds(cpus=[2, 4])
def test_long_context_inference(ranks: Pool, prompt: str, new: str) -> None:
    """Of three tokens some of four ranks keep none."""
    assert shown(ranks, "long_context_inference", "--prompt", prompt, "--new", new) == [
        "the tokens are those of one device",
        "so are their logits",
    ]


@worlds(cpus=[2])
def test_megatron_attention(ranks: Pool) -> None:
    said = shown(ranks, "megatron_attention", "--tokens", "64", "--steps", "3")
    assert said == ["the losses are those of one process"]


@worlds(cpus=[2], gpus=[])
@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
def test_hf_finetune(ranks: Pool, layout: str) -> None:
    pytest.importorskip("transformers", minversion="5")
    said = shown(ranks, "hf_finetune", "--steps", "2", "--seq-len", "96", "--layout", layout)
    assert said == ["the loss curve is that of one process"]


FEW_ROLLOUTS = ["--answers", "3", "--prompt", "40", "--answer", "12", "--steps", "1"]


@worlds(cpus=[2])
def test_rl_prefix_trees(ranks: Pool) -> None:
    """Of so few tokens the time that is saved says nothing."""
    assert shown(ranks, "rl_prefix_trees", *FEW_ROLLOUTS) == [
        "gradients are those of each rollout alone",
        "the loss curve is that of rollouts apart",
    ]


@worlds(cpus=[2, 4], gpus=[])
def test_hf_trainer(ranks: Pool) -> None:
    """On four ranks two groups, each with its rows, of which it learns its own number of tokens."""
    pytest.importorskip("accelerate")
    sizes = ["--dp", str(ranks.size // 2), "--steps", "2", "--tokens", "96"]
    for way in ([], ["--loop", "--layout", "contiguous"]):
        assert shown(ranks, "hf_trainer", *sizes, *way) == TRAINED


@pytest.mark.parametrize("attention", ["varlen", "sdpa"])
@worlds(cpus=[2], gpus=[])
def test_torchtitan_context_parallel(ranks: Pool, attention: str) -> None:
    sizes = ["--tokens", "64", "--steps", "2", "--attention", attention]
    assert shown(ranks, "torchtitan_context_parallel", *sizes) == TRAINED


@worlds(cpus=[2, 4], gpus=[])
def test_rl_rollouts(ranks: Pool) -> None:
    pytest.importorskip("transformers", minversion="5")
    claims = [f"{what} are those of one process" for what in ("losses", "log-probs", "weights")]
    assert shown(ranks, "rl_rollouts", "--steps", "2", "--rollouts", "4") == claims


@worlds(cpus=[4], gpus=[4])
def test_fsdp2_context_parallel(ranks: Pool) -> None:
    assert shown(ranks, "fsdp2_context_parallel", "--tokens", "32", "--steps", "3") == [
        "the loss falls",
        "the loss curve is that of one process",
    ]


@pytest.mark.parametrize(
    ("name", "change", "claim"),
    [
        ("video_block_mask", ("EVEN", 0.5), "the balanced layout evens the work out"),
        (
            "long_context_inference",
            ("merge_", example_jobs.no_merge),
            "so are their logits",
        ),
        (
            "megatron_attention",
            (
                "customized_ops.ring_attention.api.frameworks.megatron.wrap_zigzag_attn_func",
                example_jobs.no_peers,
            ),
            "the losses are those of one process",
        ),
        (
            "torchtitan_context_parallel",
            (f"{SLOTS}.torchtitan.wrap_ring_attn_varlen_func", example_jobs.no_peers_varlen),
            "losses are those of one process",
        ),
    ],
)
def test_what_is_not_so_is_not_shown(
    two_ranks: Pool, name: str, change: tuple[str, object], claim: str
) -> None:
    for rank, (failed, said) in enumerate(two_ranks.run(example_jobs.run, name, [], change)):
        assert failed == 1
        assert rank or f"NOT SO: {claim}" in said


def test_wrong_gradients_of_a_tree_are_not_shown(two_ranks: Pool) -> None:
    change = ("wrap_masked_attn_func", example_jobs.no_peers)
    for failed, _ in two_ranks.run(example_jobs.run, "rl_prefix_trees", FEW_ROLLOUTS, change):
        assert failed == 1


def test_a_wrong_mesh_is_not_shown(four_ranks: Pool) -> None:
    change = ("wrap_zigzag_attn_func", example_jobs.no_peers)
    replies = four_ranks.run(example_jobs.run, "fsdp2_context_parallel", ["--steps", "2"], change)
    assert all(failed == 1 for failed, _ in replies)


@pytest.mark.slow
def test_an_example_starts_its_own_ranks() -> None:
    done = run("megatron_attention.py", "--tokens", "32", "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert "losses over 2 ranks: [" in done.stdout
    assert "shown: the losses are those of one process (largest difference" in done.stdout


@pytest.mark.slow
def test_a_loss_falls_as_on_one_rank() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")
    done = run("hf_finetune.py", "--steps", "3", "--seq-len", "160")
    said = re.search(r"loss (\S+) -> (\S+)\nshown: .*difference (\S+), allowed", done.stdout)
    assert said, done.stderr
    first, last, difference = map(float, said.groups())
    assert done.returncode == 0, done.stdout
    assert last < first
    assert difference < 1e-4


@pytest.mark.skipif(not nnscaler_llama.missing(2), reason="nothing is missing here")
def test_nnscaler_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["nnscaler_llama.py", "--ranks", "2"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "nnscaler_llama.py"), run_name="__main__")
    said = ended.value.code
    assert isinstance(said, str)  # which Python prints to stderr, and exits with 1
    assert said.splitlines() == nnscaler_llama.missing(2)
    if torch.cuda.device_count() == 0:
        assert "nnscaler runs on CUDA: 2 GPUs needed, 0 here" in said
