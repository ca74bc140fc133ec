"""Jobs for ``api/frameworks/test_megatron.py``: Megatron-Core's ``GPTModel``, by ``ranks.Pool``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor

from customized_ops.ring_attention.api.frameworks.megatron import RingCoreAttention

WORDS, STEPS = 64, 2  # steps of training
EXACT = {"params_dtype": torch.float64, "pipeline_dtype": torch.float64}
ON_CPU = {"use_cpu_initialization": True, "gradient_accumulation_fusion": False}
PLAIN = {"masked_softmax_fusion": False, "attention_softmax_in_fp32": False}
NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "bias_dropout_fusion": False}


def model_over(ranks: int, ours: bool) -> GPTModel:
    """Two layers with grouped queries, with Megatron's core attention or this package's."""
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
    options = EXACT | ON_CPU | PLAIN | NO_DROPOUT
    config = TransformerConfig(context_parallel_size=ranks, **sizes, **options)
    spec = get_gpt_layer_local_spec()
    if ours:
        spec.submodules.self_attention.submodules.core_attention = RingCoreAttention
    torch.manual_seed(0)
    return GPTModel(config, spec, WORDS, 64, position_embedding_type="learned_absolute").double()


@contextlib.contextmanager
def parallel(ranks: int) -> Iterator[None]:
    """Megatron's groups with so many ranks to a sequence. On CPUs its own attention needs stand-ins
    for a buffer and for the random numbers of a dropout that is 0."""
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    buffer = SimpleNamespace(get_tensor=lambda shape, dtype, _: torch.empty(shape, dtype=dtype))
    no_random = SimpleNamespace(fork=contextlib.nullcontext)
    try:
        with (
            mock.patch.object(parallel_state, "get_global_memory_buffer", lambda: buffer),
            mock.patch.object(tensor_parallel, "get_cuda_rng_tracker", lambda: no_random),
        ):
            yield
    finally:
        parallel_state.destroy_model_parallel()


def batch_of(step: int, rows: int, bounds: Sequence[int]) -> dict[str, Any]:
    """Rows of documents between bounds, with the mask that Megatron's own attention is given."""
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(WORDS, (rows, bounds[-1]), generator=draw)
    document = torch.bucketize(torch.arange(bounds[-1]), torch.tensor(bounds[1:]), right=True)
    positions = torch.arange(bounds[-1]) - torch.tensor(bounds)[document]
    attended = (document[:, None] == document).tril()
    return {
        "tokens": tokens,
        "labels": tokens.roll(-1, 1),
        "position_ids": positions.expand(rows, -1),
        "attention_mask": ~attended.expand(rows, 1, -1, -1),
    }


def own_part(batch: dict[str, Any], bounds: Sequence[int]) -> dict[str, Any]:
    """This rank's tokens, with no mask: of one document by Megatron's function, of several, for
    which it wants TransformerEngine, by the same function from each."""
    without = {name: t for name, t in batch.items() if name != "attention_mask"}
    each = [
        get_batch_on_this_cp_rank({name: t[:, start:end] for name, t in without.items()})
        for start, end in pairwise(bounds)
    ]
    own: dict[str, Any] = {name: torch.cat([part[name] for part in each], 1) for name in without}
    if len(each) > 1:
        cu, longest = torch.tensor(bounds, dtype=torch.int32), max(torch.tensor(bounds).diff())
        ends = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
        own["packed_seq_params"] = PackedSeqParams(
            qkv_format="thd", max_seqlen_q=int(longest), max_seqlen_kv=int(longest), **ends
        )
    return own


def train(
    ranks: int, ours: bool, rows: int, bounds: Sequence[int], steps: int = STEPS
) -> list[Tensor]:
    """The parameters, and then the loss of each step."""
    with parallel(ranks):
        model, losses = model_over(ranks, ours), []
        group = parallel_state.get_context_parallel_group()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(steps):
            batch = batch_of(step, rows, bounds)
            batch = own_part(batch, bounds) if ours else batch
            given = {"input_ids": batch.pop("tokens"), "attention_mask": None, **batch}
            loss = model(**given).double().sum() / (rows * bounds[-1])  # they are fp32
            optimizer.zero_grad()
            loss.backward()
            losses.append(loss.detach())
            for t in (losses[-1], *(p.grad for p in model.parameters())):
                dist.all_reduce(t, group=group)
            optimizer.step()
        return [*(p.detach() for p in model.parameters()), *losses]


def far(rows: int, bounds: Sequence[int]) -> tuple[float, float, float]:
    """How far parameters and losses over all ranks, and over one, are from those of Megatron's own
    attention; and how far its parameters are from where they began."""
    expected = train(1, False, rows, bounds)

    def worst(found: list[Tensor]) -> float:
        return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=False))

    over_ranks, alone = (train(n, True, rows, bounds) for n in (dist.get_world_size(), 1))
    return worst(over_ranks), worst(alone), worst(train(1, False, rows, bounds, steps=0))
