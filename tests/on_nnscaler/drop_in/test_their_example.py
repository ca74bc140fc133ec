"""nnscaler's example of Llama, unchanged, over an installed wheel, on CPUs.

It needs nnscaler's sources (``NNSCALER_SOURCE``), and of the packages that it asks for
``transformers==4.40.0``, ``datasets==3.6.0`` and ``tensorboard``, in a folder that
``NNSCALER_EXAMPLE_PACKAGES`` names: ``pip install --target FOLDER ...``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from wheels import install

pytestmark = [pytest.mark.nnscaler, pytest.mark.slow]

TESTS = Path(__file__).parents[2]
TOKENS = 2048
PREPARE = f"""
import datasets, torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
torch.manual_seed(0)
known = ["<s>", "</s>", "[PAD]", "<unk>", *(f"w{{n}}" for n in range(60))]
words = Tokenizer(models.WordLevel({{w: n for n, w in enumerate(known)}}, unk_token="<unk>"))
special = dict(zip(("bos_token", "eos_token", "pad_token", "unk_token"), known))
PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained("model")
sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
config = LlamaConfig(
    len(known), num_key_value_heads=4, max_position_embeddings={TOKENS}, use_cache=False, **sizes
)
LlamaForCausalLM(config).save_pretrained("model")
rows = torch.randint(4, 64, (8, {TOKENS})).tolist()
columns = {{"input_ids": rows, "attention_mask": [[1] * {TOKENS}] * 8}}
datasets.Dataset.from_dict(columns).save_to_disk("data")
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of programs in ``tmp_path / "llama"``, with a tiny model and data beside it."""
    for name in ("NNSCALER_SOURCE", "NNSCALER_EXAMPLE_PACKAGES"):
        if name not in os.environ:
            pytest.skip(f"{name} is not set")
    shutil.copytree(Path(os.environ["NNSCALER_SOURCE"]) / "examples" / "llama", tmp_path / "llama")
    info = tmp_path / "flash_attn-2.8.0.dist-info"  # transformers asks for its version
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash_attn\nVersion: 2.8.0\n")
    stand_ins, packages = (
        TESTS / "on_nnscaler" / "stand_ins",
        os.environ["NNSCALER_EXAMPLE_PACKAGES"],
    )
    path = [stand_ins, install(tmp_path), tmp_path, packages, TESTS]
    found = {"PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **found, "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", PREPARE], cwd=tmp_path, env=environment, check=True)
    return environment


RUNS = {
    "ring attention": ("--enable_ring_attn", "--enable_diff_attn"),
    "chunked loss": ("--enable_chunk_loss", "--attn_implementation", "eager"),
}


@pytest.mark.parametrize("run", RUNS)
def test_trains(tmp_path: Path, environment: dict[str, str], run: str) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node", "2", "train.py", "--plan_ngpus", "2", "--runtime_ngpus", "2"),
            *("--model_id", "../model", "--dataset_path", "../data", "--name", "tiny"),
            *("--gpu_mem_constraint", "4", "--trace_strategy", "cpu"),
            *("--max_train_steps", "2", "--grad_accumulation_steps", "1", *RUNS[run]),
        ],
        cwd=tmp_path / "llama",
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stderr.count("train_loss=") >= 2
    [code] = [path.read_text() for path in (tmp_path / "llama").rglob("gencode0.py")]
    if run == "ring attention":
        # What it is cut on is autodist's choice, by times that it measures.
        assert "customized_ops.ring_attention.ring_attn.wrap_ring_attn_func(q=" in code
    else:  # the script's own
        assert "customized_ops.chunk_linear_cross_entropy.chunk_linear_cross_entropy(" in code
