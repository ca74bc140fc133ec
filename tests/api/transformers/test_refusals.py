"""What Hugging Face models, their batches and masks are refused for."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")

import hf_jobs
from hf_models import TOKENS, batch, tiny

from customized_ops.ring_attention import DisagreementError, PackDocuments, run_ranks
from customized_ops.ring_attention.api import transformers as seqshard
from customized_ops.ring_attention.api.transformers import mask as transformers_mask

from .same import refused


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"attention_mask": torch.ones(3, 1, TOKENS, TOKENS)},
            "attention_mask is Tensor (3, 1, 22",
        ),
        ({"output_attentions": True}, "output_attentions: the weights are never made"),
        ({"head_mask": torch.ones(4)}, "LlamaAttention passes head_mask, which is not supported"),
        ({"position_bias": torch.ones(4)}, "passes position_bias"),
        ({"cu_seq_lens_k": torch.tensor([0, 22])}, "give cu_seq_lens_q, and if also"),
        (dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 22])), "one row"),
        (
            {
                "position_ids": torch.arange(TOKENS).remainder(9).repeat(3, 1),
                "attention_mask": torch.ones(3, TOKENS).tril(20),
            },
            "position_ids restart in row 0 at token 9, and attention_mask has padding",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(changed: dict[str, Any], message: str) -> None:
    assert message in refused(changed)


# Of a rank with contiguous, and with zigzag shards; and of whole rows.
PART, TORN = torch.arange(22, 44), torch.cat([torch.arange(11), torch.arange(33, 44)])
WHOLE = torch.arange(TOKENS).remainder(9)


@pytest.mark.parametrize(
    ("positions", "ranks", "told"),
    [
        *((PART, 2, True), (TORN, 2, True), (PART, 1, False), (None, 2, False)),
        *((WHOLE, 2, False), (WHOLE + 1, 2, False), (WHOLE + 2, 2, True)),
    ],
)
def test_a_part_that_is_attended_alone_is_told(
    positions: torch.Tensor | None, ranks: int, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    model, given = tiny("llama", layers=2), batch("plain", 1)
    model.set_attn_implementation("seqshard")
    if positions is not None:
        given["position_ids"] = positions[None]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(**given, use_cache=False)
    said = [str(each.message) for each in caught if "seqshard" in str(each.message)]
    assert len(said) == told
    assert not told or "position_ids begin above 1, as of a rank's part" in said[0]


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_generating_with_padding_among_several_ranks(
    cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A static cache has room for more keys than there are positions."""
    model, given = tiny("llama", layers=1), batch("padded left")
    model.set_attn_implementation("seqshard")
    tokens = {name: given[name] for name in ("input_ids", "attention_mask")}
    how: Any = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": cache}
    alone = model.generate(**tokens, **how)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*position_ids begin")
        assert torch.equal(model.generate(**tokens, **how), alone)


@pytest.mark.parametrize("packed", [False, True])
def test_a_rank_without_tokens_is_refused_on_all(packed: bool) -> None:
    def body(comm: Any) -> str:
        given: Any = {"input_ids": torch.ones(1, 1, dtype=torch.int64)}
        if packed:
            given = PackDocuments(comm.size, comm.rank, (4, 2))([[7]])
        with pytest.raises(ValueError) as error:
            seqshard.shard_batch(given, comm)
        return str(error.value)

    first, second = run_ranks(2, body)
    assert first == second and "rank 1 has no token in" in first


def test_layers_that_mix_tokens_otherwise_are_not_cut() -> None:
    model = tiny("llama", layers=1)
    model.config.layer_types = ["linear_attention"]
    for layer in model.model.layers:
        layer.self_attn.config.layer_types = ["full_attention", "linear_attention"]
    said = run_ranks(1, lambda comm: _refused_cut(model, comm))[0]
    assert "layers of type linear_attention, which would mix only" in said


def _refused_cut(model: nn.Module, comm: Any) -> str:
    with pytest.raises(NotImplementedError) as error:
        hf_jobs.cut(model, batch("plain"), comm, "contiguous")
    return str(error.value)


def test_what_masks_cannot_be_told_is_refused() -> None:
    from transformers.masking_utils import (
        and_masks,
        blockwise_overlay,
        causal_mask_function,
        or_masks,
    )

    blocks = or_masks(causal_mask_function, blockwise_overlay(torch.zeros(1, 4)))
    own = and_masks(causal_mask_function, lambda b, h, q, k: q > k)
    for function, message in ((blocks, "a part, or_masks"), (own, "a part of the model's own")):
        with pytest.raises(NotImplementedError, match=message):
            transformers_mask.make_mask(1, 4, 4, mask_function=function)
    mask = transformers_mask.make_mask(1, 4, 4, mask_function=causal_mask_function)
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match="sliding_window=3, but the window of its mask is none"):
        seqshard.attention(nn.Module(), q, q, q, mask, sliding_window=3)
    with pytest.raises(
        ValueError, match="the mask is of 4 queries and 4 keys, but the layer has 4"
    ):
        seqshard.attention(nn.Module(), q, q[:, :, :3], q[:, :, :3], mask)
    positions = torch.tensor([[0, 1, 0, 1]])
    cached = transformers_mask.make_mask(1, 4, 6, 2, 0, mask_function=causal_mask_function)
    k = torch.zeros(1, 2, 6, 8)
    with pytest.raises(ValueError, match="position_ids restart among 4 queries that have 6 keys"):
        seqshard.attention(nn.Module(), q, k, k, cached, position_ids=positions)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"position_ids": None},
            "position_ids begin with [0, 1, 2, 3], but the tokens of this rank",
        ),
        ({"attention_mask": torch.ones(3, 11)}, "attention_mask does not go with a rank's part"),
        (
            {"input_ids": torch.ones(3, 9, dtype=torch.int64), "position_ids": None},
            "3 rows of 9 tokens, but",
        ),
    ],
)
def test_parts_that_are_not_this_ranks_are_refused(changed: dict[str, Any], message: str) -> None:
    model = tiny("llama", layers=1)
    model.set_attn_implementation("seqshard")

    def rank(comm: Any) -> str:
        shard = seqshard.shard_batch({"input_ids": batch("plain")["input_ids"]}, comm)
        with shard.context(), pytest.raises((ValueError, DisagreementError)) as error:
            model(**(dict(shard.inputs) | changed))
        return str(error.value)

    assert any(message in said for said in run_ranks(2, rank))


def test_position_ids_of_other_tokens_are_refused() -> None:
    def rank(comm: Any) -> str:
        shard = seqshard.shard_batch({"input_ids": batch("plain")["input_ids"]}, comm)
        with shard.context():
            cut = seqshard.current_cut()
        assert cut is not None
        with pytest.raises(ValueError) as error:
            cut.check(torch.Size([3, cut.positions.shape[1], 2, 8]), torch.arange(13)[None])
        return str(error.value)

    said = run_ranks(2, rank)
    assert all("position_ids are of 13 tokens, but this rank holds 1" in each for each in said)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"input_ids": None}, "neither input_ids nor inputs_embeds"),
        ({"token_type_ids": torch.ones(3, TOKENS)}, "the batch has token_type_ids, and how to cut"),
        (
            {"input_ids": torch.ones(TOKENS)},
            "tokens must be [b, l], or [b, l, d] embedded",
        ),
        ({"input_ids": [[1, 2]]}, "shard_batch: tokens must be a tensor, got [[1, 2]]"),
        ({"position_ids": [0, 1]}, "shard_batch: position_ids must be a tensor, got [0, 1]"),
        ({"labels": torch.ones(3, 9)}, "labels must be of 22 tokens a row, got (3, 9)"),
        ({"cu_seq_lens_q": [0, 9]}, "cu_seq_lens_q must rise from 0 to the 22 tokens"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        seqshard.shard_batch(batch("plain") | changed, None)
    assert message in str(error.value)
    with pytest.raises(ValueError, match="layout must be zigzag, contiguous, striped"):
        seqshard.shard_batch(batch("plain"), None, "diagonal")


def test_what_is_no_tensor_is_named() -> None:
    wrong: Any = [1.0, 2.0]
    calls: dict[str, Callable[[], object]] = {
        "shard_batch: batch must be a mapping of tensors by name": (
            lambda: seqshard.shard_batch(wrong, None)
        ),
        "sum_over_ranks: share must be a tensor, got [1.0, 2.0]": (
            lambda: seqshard.sum_over_ranks(wrong, None)
        ),
        "sum_gradients: parameters must be a module, or parameters, got [1.0, 2.0]": (
            lambda: seqshard.sum_gradients(wrong, None)
        ),
    }
    for said, call in calls.items():
        with pytest.raises(ValueError, match=re.escape(said)):
            call()


def test_one_parameter_is_no_sequence_of_them() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    seqshard.sum_gradients(parameter, None)  # type: ignore[arg-type]
    assert parameter.grad is not None, "it takes part with zeros"
