"""Jobs for ``api/frameworks/test_torchtitan.py``: torchtitan's own Trainer; see ``ranks.Pool``."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from shared import torchtitan_attention as inner
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import distribute_tensor
from torchtitan import trainer as titan
from torchtitan.components import validate
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.models import llama3, qwen3
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel_varlen_attn

from customized_ops.ring_attention.api.frameworks import torchtitan as ours

STEPS, TOKENS, ROWS = 3, 64, 2
FAMILIES: dict[str, Any] = {"llama3": llama3, "qwen3": qwen3}


def texts(folder: Path) -> None:
    """A tokenizer of a hundred words, and documents of 3 to 40 of them."""
    words = {f"w{n}": n for n in range(100)} | {"<s>": 100, "</s>": 101}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 40, (60,), generator=draw).tolist()
    rows = [torch.randint(100, (length,), generator=draw).tolist() for length in lengths]
    lines = [json.dumps({"text": " ".join(f"w{n}" for n in row)}) for row in rows]
    (folder / "texts").mkdir()
    (folder / "texts/train.jsonl").write_text("\n".join(lines))


def config_of(folder: Path, family: str, ranks: int, balancer: str | None) -> titan.Trainer.Config:
    """``llama3_debugmodel_varlen_attn``, or that of another family, in fp32, of short rows of the
    texts of a folder."""
    config = llama3_debugmodel_varlen_attn()
    config.model_spec = FAMILIES[family].model_registry("debugmodel", attn_backend="varlen")
    config.parallelism.context_parallel_degree = ranks
    config.parallelism.spmd_backend = "partial_dtensor"
    config.parallelism.context_parallel_load_balancer = balancer
    config.training.local_batch_size, config.training.seq_len = ROWS, TOKENS
    config.training.steps, config.training.mixed_precision_param = STEPS, "float32"
    config.validator.enable, config.validator.freq, config.validator.steps = True, STEPS, 2
    config.hf_assets_path = str(folder)
    for loader in (config.dataloader, config.validator.dataloader):
        loader.dataset, loader.dataset_path = "c4_test", str(folder / "texts")
    config.dump_folder = str(folder / "outputs")
    return config


@contextlib.contextmanager
def changed_as_the_page_says(family: str) -> Iterator[None]:
    """Three imports, and no check of varlen attention over ranks."""
    with contextlib.ExitStack() as stack:
        for module, name in (
            (FAMILIES[family].parallelize, "apply_cp_to_forward"),
            (titan, "prepare_context_parallel_input"),
            (validate, "prepare_context_parallel_input"),
        ):
            stack.enter_context(mock.patch.object(module, name, getattr(ours, name)))
        unchecked = SimpleNamespace(Config=())
        stack.enter_context(mock.patch.object(FAMILIES[family].model, "VarlenAttention", unchecked))
        yield


def varlen(self: VarlenAttention, *qkv: Tensor, attention_masks: Any, **options: Any) -> Tensor:
    """In place of torchtitan's on one rank, which calls a kernel of GPUs in bf16."""
    return inner.VarlenAttention()(*qkv, attention_masks=attention_masks, **options)


def made_for_cpus(trainer: titan.Trainer) -> None:
    """The same weights on any number of ranks, where torchtitan on CPUs draws others; and gradients
    are added up by the only sum that gloo has."""
    whole, draw = trainer.model_parts[0], torch.Generator().manual_seed(0)
    for module in whole.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    for weight in whole.parameters():
        drawn = 0.1 * torch.randn(weight.shape, generator=draw) + (weight.ndim == 1)
        weight.data.copy_(distribute_tensor(drawn, weight.device_mesh, weight.placements))


@contextlib.contextmanager
def on_cpus(logged: list[float]) -> Iterator[None]:
    """Stand-ins for what torchtitan asks of GPUs alone, and for its log."""
    monitor = SimpleNamespace(device_name="CPU", reset_peak_stats=lambda: None)
    monitor.get_peak_stats = lambda: SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)

    def log(self: Any, step: int, average: float, largest: float, norm: float, **_: Any) -> None:
        logged.extend([average, norm])

    def log_validation(self: Any, loss: float, step: int, *_: Any, **__: Any) -> None:
        logged.append(loss)

    def groups_made(self: titan.Trainer) -> ParallelDims:
        return ParallelDims.from_config(self.config.parallelism, dist.get_world_size())

    stand_ins: list[tuple[Any, str, Any]] = [
        (titan.utils, "device_type", "cpu"),
        (titan.utils, "device_module", torch.cpu),
        (parallel_dims, "device_type", "cpu"),
        (titan.Trainer, "init_distributed", groups_made),
        (titan.dist_utils, "set_pg_timeouts", lambda **_: None),
        (titan.time, "sleep", lambda _: None),
        (MetricsProcessor, "log", log),
        (MetricsProcessor, "log_validation", log_validation),
        (VarlenAttention, "forward", varlen),
    ]
    metrics = "torchtitan.components.metrics.build_device_memory_monitor"
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch(metrics, lambda: monitor))
        stack.enter_context(mock.patch.dict(os.environ, LOCAL_RANK=str(dist.get_rank())))
        for target, name, stand_in in stand_ins:
            stack.enter_context(mock.patch.object(target, name, stand_in))
        yield


def trained(family: str, ranks: int = 1, balancer: str | None = "headtail") -> list[float]:
    """The loss and the gradients' norm of each step, and losses of validation."""
    logged: list[float] = []
    ours._prepared.clear()  # a program of its own, over the same groups
    with tempfile.TemporaryDirectory() as folder, on_cpus(logged):
        texts(Path(folder))
        with changed_as_the_page_says(family) if ranks > 1 else contextlib.nullcontext():
            trainer = titan.Trainer(config_of(Path(folder), family, ranks, balancer))
            made_for_cpus(trainer)
            trainer.train()
            trainer.close()
    gc.enable()  # torchtitan turns it off
    return logged


def alone(family: str) -> list[float]:
    """:func:`trained` on this process, outside of any group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return trained(family)
    finally:
        dist.destroy_process_group()
