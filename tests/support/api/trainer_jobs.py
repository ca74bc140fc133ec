"""Jobs for ``api/frameworks/test_trainer.py``; see ``ranks.Pool``."""

from __future__ import annotations

import os
import tempfile
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate.utils import ParallelismConfig
from hf_models import tiny
from torch import Tensor
from transformers import Trainer, TrainingArguments

from customized_ops.ring_attention.api.frameworks.accelerate import ContextParallel

Answer = tuple[float, Any, Any, Any]


class OnCpu(ParallelismConfig):
    """accelerate refuses its own on CPUs."""

    def _validate_accelerator(self, accelerator: Any) -> None: ...


class SequenceTrainer(ContextParallel, Trainer):
    """A Trainer over ranks."""


def rows() -> list[dict[str, Tensor]]:
    """Five, of which each learns another number of tokens."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 48, (5, 26), generator=draw)
    masked = torch.arange(26) < 4 * torch.arange(1, 6)[:, None]
    labels = tokens.masked_fill(masked, -100)
    return [{"input_ids": t, "labels": own} for t, own in zip(tokens, labels, strict=True)]


def evaluated(kind: type[Trainer], attention: str, batch_size: int, **options: Any) -> Answer:
    """A Trainer's loss, predictions and labels of :func:`rows`, and predictions without labels."""
    model = tiny("llama")
    model.set_attn_implementation(attention)
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"per_device_eval_batch_size": batch_size, "use_cpu": True}
        quiet = {"report_to": "none", "disable_tqdm": True}
        arguments = TrainingArguments(folder, **sizes, **quiet, **options)
        trainer = kind(model, arguments, eval_dataset=rows())
        loss = trainer.evaluate()["eval_loss"]
        found = trainer.predict(rows())
        plain = trainer.predict([{"input_ids": row["input_ids"]} for row in rows()])
    return loss, found.predictions, found.label_ids, plain.predictions


def on_ranks(batch_size: int) -> Answer:
    """:func:`evaluated` over pairs of ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in torchrun.items()}):
        config = OnCpu(cp_size=2, dp_shard_size=size // 2)
        return evaluated(SequenceTrainer, "seqshard", batch_size, parallelism_config=config)
