"""Jobs for ``api/frameworks/test_verl.py``: verl's own FSDP engine; see ``ranks.Pool``."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hf_models import tiny
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForTokenClassification, LlamaForTokenClassification
from transformers.integrations import flash_attention
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import (
    ActorConfig,
    CriticConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
)
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead
from verl.workers.utils.losses import ppo_loss, value_loss
from verl.workers.utils.padding import left_right_2_no_padding

from customized_ops.ring_attention.api.frameworks.verl import SequenceParallel

ROLLOUTS, PROMPT, RESPONSE, WORDS, UPDATES = 6, 10, 24, 48, 2


class OnCpu(PlatformCUDA):
    """verl knows GPUs and NPUs."""

    device_name, device_module = "cpu", torch.cpu

    def current_device(self) -> str:
        return "cpu"


set_platform(OnCpu())
transformer_impl.device_name = "cpu"  # it has asked before


class Actor(SequenceParallel, FSDPEngineWithLMHead):
    """verl's engine over ranks."""


class Critic(SequenceParallel, FSDPEngineWithValueHead):
    """The same with values of tokens."""


def save_model(folder: str) -> None:
    """A tiny model as transformers keeps it."""
    tiny("llama").float().save_pretrained(folder)


def loaded_critic(*given: Any, attn_implementation: str, **options: Any) -> nn.Module:
    """With the same head each time."""
    assert attn_implementation == "flash_attention_2"
    torch.manual_seed(0)
    return LlamaForTokenClassification.from_pretrained(*given, **options)


def engine_of(
    kind: type[FSDPEngineWithLMHead], folder: str, ranks: int, packed: bool
) -> FSDPEngineWithLMHead:
    """An engine with the model of a folder, in fp32."""
    is_critic = issubclass(kind, FSDPEngineWithValueHead)
    model = HFModelConfig(
        model_type="value_model" if is_critic else "language_model",
        path=folder,
        load_tokenizer=False,
        use_remove_padding=packed,
        override_config={"attn_implementation": "sdpa"},
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
    # verl replaces this function, and here it is put back; and loads critics for GPUs alone.
    plain = flash_attention._flash_attention_forward
    with (
        mock.patch.object(flash_attention, "_flash_attention_forward", plain),
        mock.patch.object(AutoModelForTokenClassification, "from_pretrained", loaded_critic),
    ):
        engine.initialize()
    for module in engine.module.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    return engine


def rollouts(step: int, packed: bool) -> TensorDict:
    """What verl's trainer hands to actor and critic: prompts padded on the left, responses on the
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
            "values": torch.randn(ROLLOUTS, RESPONSE, generator=draw),
            "returns": torch.randn(ROLLOUTS, RESPONSE, generator=draw),
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
    """Log-probs and entropies of each rollout, or values, before each update; and of each update
    the loss and, on the first rank, the gradients' norm."""
    common = {"strategy": "fsdp2", "ppo_micro_batch_size_per_gpu": 1}
    common["loss_agg_mode"] = "seq-mean-token-mean"
    names, loss = ["values"], partial(value_loss, CriticConfig(**common))
    if not issubclass(kind, FSDPEngineWithValueHead):
        names = ["log_probs", "entropy"]
        loss = partial(ppo_loss, ActorConfig(rollout_n=1, entropy_coeff=0.01, **common))
    found: list[Tensor] = []
    numbers: list[float] = []
    engine = engine_of(kind, *given, packed=packed)
    for step in range(UPDATES):
        with engine.eval_mode(), torch.no_grad():
            told = engine.infer_batch(rollouts(step, packed))["model_output"]
        # After a rollout's last token comes another's: verl does not use it, either.
        found += [one[:-1] for name in names for one in told[name].unbind()]
        with engine.train_mode():
            outputs = engine.train_batch(rollouts(step, packed), loss)
        numbers.append(sum(outputs["loss"]))
        if dist.get_rank() == 0:
            numbers.append(outputs["metrics"]["grad_norm"])
    return found, numbers


def on_ranks(kind: type[FSDPEngineWithLMHead], folder: str) -> tuple[list[Tensor], list[float]]:
    """:func:`trained` over all ranks."""
    return trained(kind, folder, dist.get_world_size(), packed=True)


def alone(kind: type[FSDPEngineWithLMHead], folder: str) -> tuple[list[Tensor], list[float]]:
    """:func:`trained` by verl alone on this process, outside of any group, of padded rows."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return trained(kind, folder, 1, packed=False)
    finally:
        dist.destroy_process_group()
