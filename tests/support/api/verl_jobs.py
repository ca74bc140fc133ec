"""Jobs for ``api/test_verl.py``: verl's own FSDP engine; see ``ranks.Pool``."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hf_models import tiny
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers.integrations import flash_attention
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import (
    ActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
)
from verl.workers.engine import FSDPEngineWithLMHead
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

from customized_ops.ring_attention.api.frameworks.verl import SequenceParallel
from customized_ops.ring_attention.api.transformers import register

ROLLOUTS, PROMPT, RESPONSE, WORDS, UPDATES = 6, 10, 24, 48, 2


class OnCpu(PlatformCUDA):
    """verl knows GPUs and NPUs."""

    device_name, device_module = "cpu", torch.cpu

    def current_device(self) -> str:
        return "cpu"


set_platform(OnCpu())
transformer_impl.device_name = "cpu"  # it has asked before


class SequenceEngine(SequenceParallel, FSDPEngineWithLMHead):
    """verl's engine over ranks."""


def save_model(folder: str) -> None:
    """A tiny model as transformers keeps it."""
    tiny("llama").float().save_pretrained(folder)


def engine_of(
    kind: type[FSDPEngineWithLMHead], folder: str, ranks: int, attention: str, packed: bool
) -> FSDPEngineWithLMHead:
    """An engine with the model of a folder, in fp32."""
    model = HFModelConfig(
        path=folder,
        load_tokenizer=False,
        use_remove_padding=packed,
        override_config={"attn_implementation": attention},
    )
    fp32 = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    config = FSDPEngineConfig(
        strategy="fsdp2",
        mixed_precision=fp32,
        use_torch_compile=False,
        ulysses_sequence_parallel_size=ranks,
    )
    optimizer = FSDPOptimizerConfig(lr=1e-2, total_training_steps=UPDATES)
    engine = kind(model, config, optimizer, CheckpointConfig())
    # verl replaces this function, and here it is put back.
    plain = flash_attention._flash_attention_forward
    with mock.patch.object(flash_attention, "_flash_attention_forward", plain):
        engine.initialize()
    for module in engine.module.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    return engine


def rollouts(step: int, packed: bool) -> TensorDict:
    """What verl's trainer hands to its actor: prompts padded on the left, responses on the
    right."""
    draw = torch.Generator().manual_seed(step)
    prompts = torch.randint(2, PROMPT, (ROLLOUTS, 1), generator=draw)
    responses = torch.randint(1, RESPONSE, (ROLLOUTS, 1), generator=draw)
    at = torch.arange(PROMPT + RESPONSE)
    attended = ((at >= PROMPT - prompts) & (at < PROMPT + responses)).long()
    tokens = torch.randint(WORDS, attended.shape, generator=draw) * attended
    data = TensorDict(
        {
            "input_ids": tokens,
            "prompts": tokens[:, :PROMPT],
            "responses": tokens[:, PROMPT:],
            "attention_mask": attended,
            "position_ids": (attended.cumsum(1) - 1).clamp(min=0),
            "response_mask": attended[:, PROMPT:],
            "old_log_probs": -4 * torch.rand(ROLLOUTS, RESPONSE, generator=draw),
            "advantages": torch.randn(ROLLOUTS, 1, generator=draw).expand(-1, RESPONSE),
        },
        batch_size=ROLLOUTS,
    )
    left_right_2_no_padding(data)
    tensordict_utils.assign_non_tensor(
        data,
        use_remove_padding=packed,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=PROMPT + RESPONSE + 10,
        temperature=0.7,
        calculate_entropy=True,
        global_batch_size=ROLLOUTS,
    )
    return data


def trained(
    kind: type[FSDPEngineWithLMHead], *given: Any, packed: bool
) -> tuple[list[Tensor], list[float]]:
    """Log-probs and entropies of each rollout before each update; and of each update the loss and,
    on the first rank, the gradients' norm."""
    actor = ActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode="seq-mean-token-mean",
        entropy_coeff=0.01,
    )
    found: list[Tensor] = []
    numbers: list[float] = []
    engine = engine_of(kind, *given, packed=packed)
    for step in range(UPDATES):
        with engine.eval_mode(), torch.no_grad():
            told = engine.infer_batch(rollouts(step, packed))["model_output"]
        # After a rollout's last token comes another's: verl does not use it, either.
        found += [one[:-1] for name in ("log_probs", "entropy") for one in told[name].unbind()]
        with engine.train_mode():
            outputs = engine.train_batch(rollouts(step, packed), partial(ppo_loss, actor))
        numbers.append(sum(outputs["loss"]))
        if dist.get_rank() == 0:
            numbers.append(outputs["metrics"]["grad_norm"])
    return found, numbers


def on_ranks(folder: str) -> tuple[list[Tensor], list[float]]:
    """:func:`trained` over all ranks."""
    register()
    return trained(SequenceEngine, folder, dist.get_world_size(), "seqshard", packed=True)


def alone(folder: str) -> tuple[list[Tensor], list[float]]:
    """:func:`trained` by verl alone on this process, outside of any group, of padded rows."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return trained(FSDPEngineWithLMHead, folder, 1, "sdpa", packed=False)
    finally:
        dist.destroy_process_group()
