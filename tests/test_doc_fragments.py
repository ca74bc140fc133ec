"""Blocks of the documentation that need ranks, a model of the reader's, or a shell."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import doc_jobs
import engine_jobs
import pytest
import rl_prefix_trees
import torch
from benchmark import command, linear_attention, packed_training, training
from doc_blocks import ROOT, blocks
from ranks import Pool

import annotations
from annotations import ComputeConfig
from annotations.engines.torch import __main__ as engine_commands
from annotations.engines.torch import plan_without_ranks
from customized_ops.ring_attention import __main__ as commands

# What each block marked py has in it, and why it does not run here, if it does not.
FRAGMENTS = {
    'dist.init_process_group("gloo")': "",
    "def policy(": "",
    'engine="nnscaler"': "needs CUDA and nnscaler; tests/on_nnscaler makes such calls",
    "nnscaler_constraints.yaml": "",
    "class LossOf": "",
    "class PackedLoss": "needs ranks; tests/api/transformers/test_on_ranks.py runs it",
    '"mesh_shape": (4, 2)': "",
    "plans_without_ranks": "",
    "module(batch.tokens": "needs ranks; tests/engine/module/test_shapes.py has such a loader",
    "def other_package(": "needs ranks; tests/probes/test_users_models.py has such functions",
    "shard_batch(batch.to(": "needs ranks; tests/api/transformers/test_packed_batches.py has one",
    "timeout=timedelta(": "needs ranks; tests/probes/test_users_models.py runs it",
    "part.sums(part.of_targets(": "needs ranks; tests/rollouts/test_part.py has such sums",
    "part.of_tokens(drawn_with)": "needs a model; tests/rollouts/test_part.py has such a loss",
    "rollout_parts(loader": "needs ranks; tests/rollouts/test_planned.py has such a loader",
    "warm_up(tokens=": "needs a GPU and a training; tests/ops/batches/test_warm_up.py",
}


def fragment(what: str) -> str:
    """The one block with ``what`` in it."""
    assert not FRAGMENTS[what]
    (code,) = (code for code, _ in blocks("py") if what in code)
    return code


def run(code: str, **names: Any) -> dict[str, Any]:
    """The names that a block leaves behind."""
    exec(compile(code, "block", "exec"), names)
    return names


def test_each_fragment_is_known() -> None:
    found = [[what for what in FRAGMENTS if what in code] for code, _ in blocks("py")]
    assert sorted(found) == sorted([what] for what in FRAGMENTS)


@pytest.mark.parametrize("number", range(len(FRAGMENTS)))
def test_fragments_import_what_exists(number: int) -> None:
    for node in ast.walk(ast.parse(blocks("py")[number][0])):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            assert all(hasattr(module, alias.name) for alias in node.names)


@pytest.mark.slow
def test_two_copies_make_a_step(four_ranks: Pool) -> None:
    for far in four_ranks.run(
        doc_jobs.step_of_two_copies, fragment('dist.init_process_group("gloo")')
    ):
        assert len(far) > 10 and all(far[what] < 1e-10 for what in far), far


def test_a_policy_decides_op_by_op() -> None:
    policy = run(fragment("def policy("))["policy"]
    plan = plan_without_ranks(doc_jobs.llama(), doc_jobs.batch(0), policy, ComputeConfig(2, 2))
    assert (plan.splits["ring_attn"], plan.splits["ring_attn_1"]) == ("g", "l")


def test_a_plan_of_a_mesh_with_limits() -> None:
    """Planned for as many ranks as the block says, of which none is there."""
    with mock.patch.object(annotations, "parallelize", plan_without_ranks):
        code = fragment('"mesh_shape": (4, 2)').replace("plan_ngpus=8,", "8, 8,")
        example = {"x": torch.zeros(2, 8, 8)}
        plan = run(code, model=engine_jobs.Plain("fine"), example=example)["model"]
    assert str(plan).startswith("plan: 8 ranks (4 x 2) a copy")
    assert plan.limit_bytes == 70e9


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, pytest.param(32, marks=pytest.mark.slow)])
def test_a_large_model_is_planned_without_ranks(
    layers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a layer in place of the 32, unless there is time."""
    run(fragment("plans_without_ranks").replace("layers=32", f"layers={layers}"))
    assert capsys.readouterr().out.startswith("plan: 8 ranks a copy")


def test_the_constraints_of_nnscalers_planner_are_found() -> None:
    pas_config = run(fragment("nnscaler_constraints.yaml"), pas_config={})["pas_config"]
    text = Path(pas_config["partition_constraints_path"]).read_text()
    assert "name: customized_ops.ring_attention.ring_attn.wrap_ring_attn_func" in text


def test_a_loss_of_transformers_is_planned() -> None:
    hf = pytest.importorskip("transformers", reason="transformers is not installed: '.[hf]'")
    from customized_ops.ring_attention.api import transformers as seqshard

    seqshard.register()
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=1)
    config = hf.LlamaConfig(**sizes, vocab_size=50, attn_implementation="seqshard")
    model = hf.LlamaForCausalLM(config)
    loss_of = run(fragment("class LossOf"), torch=torch)["LossOf"](model)
    tokens = torch.randint(50, (1, 32), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(32)[None]}
    assert torch.equal(loss_of(**batch), model(**batch).loss)
    plan = plan_without_ranks(loss_of, batch, "cp", ComputeConfig(2, 2))
    assert re.search(r"\bl / 2\b", str(plan)), plan


# How the arguments of each script and module that a page names are read.
PARSERS: dict[str, Callable[[list[str]], Any]] = {
    "examples/benchmark/attention.py": lambda given: benchmark(given),
    "examples/benchmark/linear_attention.py": lambda given: linear_attention.parse(given),
    "examples/benchmark/training.py": lambda given: training.parse(given),
    "examples/benchmark/packed_training.py": lambda given: packed_training.parse(given),
    "examples/benchmark/parts/kernel_speed.py": lambda given: beside("speed.arguments", given),
    "examples/benchmark/parts/awake_links.py": lambda given: beside("awake_links", given),
    "examples/benchmark/parts/held_keys.py": lambda given: beside("held_keys", given),
    "examples/benchmark/parts/new_batches.py": lambda given: beside(
        "new_batches", [*given, "--device", "cpu"]
    ),
    "examples/benchmark/parts/planning/batch_time.py": lambda given: beside(
        "planning.batch_time", given
    ),
    "examples/benchmark/parts/planning/many_hosts.py": lambda given: beside(
        "planning.many_hosts", given
    ),
    "examples/benchmark/parts/planning/simulated_points.py": lambda given: beside(
        "planning.simulated_points", given
    ),
    "examples/benchmark/parts/planning/tiles.py": lambda given: beside("planning.tiles", given),
    "examples/benchmark/parts/host_time.py": lambda given: beside("host_time", given),
    "examples/benchmark/parts/two_protocols.py": lambda given: beside("two_protocols", given),
    "examples/rl_prefix_trees.py": lambda given: rl_prefix_trees.parse(given),
    "customized_ops.ring_attention": lambda given: commands._parser().parse_args(given),
    "annotations.engines.torch": lambda given: engine_command(given),
}
# What fetches something, or says where libraries are.
NOT_OURS = ("git clone ", ".venv/bin/pip install ", "export ", "nvidia=")


def benchmark(given: list[str]) -> None:
    """Its arguments, as on a machine with GPUs."""
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        command.parse(given)


def beside(module: str, given: list[str]) -> None:
    """Arguments of a measurement, by a module of its folder."""
    on_cpu = ["--device", "cpu", "--tokens", "512"] if module == "speed.arguments" else []
    with mock.patch.object(
        sys, "path", [str(ROOT / "examples" / "benchmark" / "parts"), *sys.path]
    ):
        importlib.import_module(module).parse([*given, *on_cpu])


def engine_command(given: list[str]) -> None:
    """The engine's command line, that does nothing."""
    with (
        mock.patch.object(engine_commands, "measure"),
        mock.patch.object(engine_commands, "plan"),
        mock.patch.object(sys, "argv", ["", *given]),
    ):
        engine_commands.main()


def lines() -> list[str]:
    """What the pages tell a shell to do."""
    each = "\n".join(code for code, _ in blocks("sh")).splitlines()
    return sorted({line.split(" # ")[0].strip() for line in each if line})


@pytest.mark.parametrize("line", [line for line in lines() if not line.startswith(NOT_OURS)])
def test_commands_exist_and_take_these_arguments(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some begin a file
    words = shlex.split(line)
    if re.match("[A-Z_]+=", words[0]):  # of the environment
        words = words[1:]
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{word}:", makefile, re.MULTILINE) for word in words[1:])
        return
    program, *rest = words
    assert Path(program).name in ("python", "torchrun"), line
    while rest[0].startswith("--"):  # torchrun's own
        rest = rest[2:]
    if rest[0] == "-m":
        rest = rest[1:]
    name, *given = rest
    if name == "pytest":
        paths = [word for word in given if word.startswith("tests")]
        assert all((ROOT / path).exists() for path in paths), line
        return
    assert importlib.util.find_spec(name) if "/" not in name else (ROOT / name).exists(), line
    PARSERS[name](given)


def test_what_a_command_does_not_take_is_seen() -> None:
    for parse in PARSERS.values():
        with pytest.raises(SystemExit):
            parse(["--no-such-option"])
