"""nnscaler's example of Llama over an installed wheel, on CPUs: with no line changed, also where a
variable of the environment asks for a ring, and with one line that gives autodist our constraints.
Its losses are those of one process.

It needs nnscaler's sources (``NNSCALER_SOURCE``), and of the packages that it asks for
``transformers==4.40.0``, ``datasets==3.6.0`` and ``tensorboard``, in a folder that
``NNSCALER_EXAMPLE_PACKAGES`` names: ``pip install --target FOLDER ...``.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from wheels import install

pytestmark = [pytest.mark.nnscaler, pytest.mark.slow]

TESTS = Path(__file__).parents[2]
SOURCE = Path(os.environ.get("NNSCALER_SOURCE", "")) / "examples" / "llama"
TOKENS = 2048
READ = """
import json
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from pathlib import Path
[file] = Path("runs").rglob("events*")
events = EventAccumulator(str(file)).Reload()
[tag] = [tag for tag in events.Tags()["scalars"] if "train_loss" in tag]
print(json.dumps([event.value for event in events.Scalars(tag)]))
"""
PREPARE = f"""
import datasets, torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
torch.manual_seed(0)
known = ["<s>", "</s>", "[PAD]", "<unk>", *(f"w{{n}}" for n in range(60))]
words = Tokenizer(models.WordLevel({{w: n for n, w in enumerate(known)}}, unk_token="<unk>"))
special = dict(zip(("bos_token", "eos_token", "pad_token", "unk_token"), known))
PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained("model")
sizes = dict(initializer_range=0.3, hidden_size=64)
sizes |= dict(intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
config = LlamaConfig(
    len(known), num_key_value_heads=4, max_position_embeddings={TOKENS}, use_cache=False, **sizes
)
LlamaForCausalLM(config).save_pretrained("model")
rows = torch.randint(4, 64, (8, {TOKENS})).tolist()
columns = {{"input_ids": rows, "attention_mask": [[1] * {TOKENS}] * 8}}
datasets.Dataset.from_dict(columns).save_to_disk("data")
"""
# How far the loss is off if each half of a row attends to itself alone, as without a ring.
APART = f"""
import datasets, torch
from transformers import LlamaForCausalLM
model = LlamaForCausalLM.from_pretrained("model")
rows = torch.tensor(datasets.load_from_disk("data")["input_ids"])
half, places = {TOKENS} // 2, torch.arange({TOKENS})[None].expand(len(rows), -1)
def logits(part):
    return model(input_ids=rows[:, part], position_ids=places[:, part]).logits
def loss(logits):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
with torch.no_grad():
    halves = torch.cat([logits(slice(0, half)), logits(slice(half, None))], 1)
    print(abs(float(loss(halves) - loss(logits(slice(None))))))
"""


@dataclass
class Example:
    """The example, its tiny model and data, and what is installed.

    Attributes:
        folder: with the model and data. environment: of programs that run there.
        losses: of one process, by arguments.
    """

    folder: Path
    environment: dict[str, str]
    losses: dict[tuple[str, ...], list[float]] = field(default_factory=dict)

    def train(self, run: Path, ranks: int, arguments: tuple[str, ...]) -> list[float]:
        """The losses of the program in ``run`` over so many ranks."""
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc_per_node", str(ranks), "train.py", "--name", "tiny"),
                *("--plan_ngpus", str(ranks), "--runtime_ngpus", str(ranks)),
                *("--model_id", str(self.folder / "model")),
                *("--dataset_path", str(self.folder / "data")),
                *("--gpu_mem_constraint", "4", "--trace_strategy", "cpu"),
                *("--max_train_steps", "2", "--grad_accumulation_steps", "1", *arguments),
            ],
            cwd=run,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=1800,
        )
        assert done.returncode == 0, done.stderr[-5000:]
        return json.loads(self.python(READ, run))

    def python(self, script: str, folder: Path) -> str:
        """What a script prints."""
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=folder,
            env=self.environment,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        return done.stdout.splitlines()[-1] if done.stdout else ""

    def copy(self, folder: Path) -> Path:
        """The program in a folder of its own: unchanged."""
        shutil.copytree(SOURCE, folder)
        return folder

    def of_one_process(self, folder: Path, arguments: tuple[str, ...]) -> list[float]:
        """Its losses where nothing is cut."""
        if arguments not in self.losses:
            self.losses[arguments] = self.train(self.copy(folder), 1, arguments)
        return self.losses[arguments]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Example:
    for name in ("NNSCALER_SOURCE", "NNSCALER_EXAMPLE_PACKAGES"):
        if name not in os.environ:
            pytest.skip(f"{name} is not set")
    tmp_path = tmp_path_factory.mktemp("example")
    info = tmp_path / "flash_attn-2.8.0.dist-info"  # transformers asks for its version
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash_attn\nVersion: 2.8.0\n")
    stand_ins, packages = (
        TESTS / "on_nnscaler" / "stand_ins",
        os.environ["NNSCALER_EXAMPLE_PACKAGES"],
    )
    installed = install(tmp_path)
    path = [stand_ins, installed, tmp_path, packages, TESTS]
    found = {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "OMP_NUM_THREADS": "1",
        "INSTALLED": str(installed),
    }
    example = Example(tmp_path, {**os.environ, **found, "HOME": str(tmp_path)})
    example.python(PREPARE, tmp_path)
    return example


RING = ("--enable_ring_attn", "--enable_diff_attn")
CHUNKED = ("--enable_chunk_loss", "--attn_implementation", "eager")
OURS = "customized_ops.ring_attention.ring_attn.wrap_ring_attn_func(q="
TOLERANCE = 0.002  # in bf16; measured 0.0006
LOSS_TOLERANCE = 0.01  # where autodist may cut all else; measured 0.0025. Steps differ by 0.045


def with_constraints(program: Path, installed: str) -> None:
    """The one line that the page names for autodist."""
    path = program / "train.py"
    before = path.read_text()
    file = Path(installed) / "customized_ops" / "ring_attention" / "nnscaler_constraints.yaml"
    line = f"            'partition_constraints_path': {str(file)!r},\n"
    path.write_text(before.replace("        pas_config={\n", f"        pas_config={{\n{line}"))
    changes = difflib.ndiff(before.splitlines(True), path.read_text().splitlines(True))
    assert [change for change in changes if change[0] in "+-"] == [f"+ {line}"]


def test_the_tolerance_tells_a_ring_from_none(example: Example) -> None:
    assert float(example.python(APART, example.folder)) > 3 * TOLERANCE


@pytest.mark.parametrize("asked", ["by a variable", "by a line", ""])
def test_ring_attention(tmp_path: Path, example: Example, asked: str) -> None:
    """A ring where it is asked for; else attention is cut as autodist measures."""
    program = example.copy(tmp_path / "llama")
    if asked == "by a line":
        with_constraints(program, example.environment["INSTALLED"])
    variables = {"SEQSHARD_AUTODIST": "cp"} if asked == "by a variable" else {}
    losses = replace(example, environment={**example.environment, **variables}).train(
        program, 2, RING
    )
    for rank in range(2):
        calls = [line for line in generated(program, rank).splitlines() if OURS in line]
        assert len(calls) >= 8  # four of each of two layers
        if asked:
            assert all("process_group=[0, 1]" in call for call in calls), calls
    assert losses == pytest.approx(example.of_one_process(tmp_path / "one", RING), abs=TOLERANCE)


def test_chunked_loss(tmp_path: Path, example: Example) -> None:
    """The script's own, beside the package of that name."""
    program = example.copy(tmp_path / "llama")
    losses = example.train(program, 2, CHUNKED)
    name = "customized_ops.chunk_linear_cross_entropy.chunk_linear_cross_entropy("
    assert name in generated(program, 0)
    assert losses == pytest.approx(
        example.of_one_process(tmp_path / "one", CHUNKED), abs=LOSS_TOLERANCE
    )


def generated(program: Path, rank: int) -> str:
    """The code that nnscaler made for a rank."""
    [code] = [path.read_text() for path in program.rglob(f"gencode{rank}.py")]
    return code
