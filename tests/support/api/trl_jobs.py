"""Jobs for ``api/frameworks/test_trl.py``; see ``ranks.Pool``."""

from __future__ import annotations

import os
import tempfile
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from datasets import Dataset
from hf_models import tiny
from tokenizers import Tokenizer, models
from trainer_jobs import OnCpu
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer, pack_dataset

from customized_ops.ring_attention.api.frameworks.accelerate import ContextParallel

WORDS = 48  # of the tiny models


class SequenceSFT(ContextParallel, SFTTrainer):
    """TRL's Trainer over ranks."""


def packed() -> Dataset:
    """Documents of 5 to 30 tokens in rows of at most 48; every third token is not learnt."""
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(5, 30, (16,), generator=draw).tolist()
    rows = [torch.randint(WORDS - 2, (n,), generator=draw) for n in lengths]
    labels = [row.masked_fill(torch.arange(len(row)) % 3 == 0, -100).tolist() for row in rows]
    documents = {"input_ids": [row.tolist() for row in rows], "labels": labels}
    return pack_dataset(Dataset.from_dict(documents), 48, "bfd")


def trained(kind: type[SFTTrainer], attention: str, **options: Any) -> tuple[list[float], float]:
    """The losses of three steps, and the loss of evaluation after them."""
    model = tiny("llama")
    model.set_attn_implementation(attention)
    words = {f"t{n}": n for n in range(WORDS - 2)} | {"<eos>": WORDS - 2, "<pad>": WORDS - 1}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")),
        eos_token="<eos>",
        pad_token="<pad>",
    )
    steps = {"max_steps": 3, "logging_steps": 1, "learning_rate": 1e-2, "use_cpu": True}
    sizes = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "bf16": False}
    prepared = {"padding_free": True, "max_length": None}
    prepared["dataset_kwargs"] = {"skip_prepare_dataset": True}
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(folder, **steps, **sizes, **quiet, **prepared, **options)
        data = {"train_dataset": packed(), "eval_dataset": packed(), "processing_class": tokenizer}
        trainer = kind(model, arguments, **data)
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    return [log["loss"] for log in trainer.state.log_history if "loss" in log], loss


def on_ranks() -> tuple[list[float], float]:
    """:func:`trained` over all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in torchrun.items()}):
        return trained(SequenceSFT, "seqshard", parallelism_config=OnCpu(cp_size=size))
