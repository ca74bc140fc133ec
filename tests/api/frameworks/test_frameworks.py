"""Slots of frameworks: what their hooks do that the examples do not show, and what they refuse."""

from __future__ import annotations

from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refusals
from shared import torchtitan_attention as inner
from torch import Tensor

from customized_ops.ring_attention import run_ranks
from customized_ops.ring_attention.api.frameworks import accelerate, torchtitan, verl
from customized_ops.ring_attention.api.frameworks.torchtitan import (
    apply_cp_to_forward,
    prepare_context_parallel_input,
)
from customized_ops.ring_attention.api.transformers import shard_batch
from customized_ops.ring_attention.api.transformers.cut import current_cut

CPU = torch.device("cpu")
POSITIONS = torch.cat([torch.arange(n) for n in (7, 17, 20, 4)]).view(2, 24)


def metadata(positions: Tensor) -> inner.VarlenMetadata:
    starts = (positions.flatten() == 0).nonzero().flatten().int()
    ends = torch.cat([starts, torch.tensor([positions.numel()], dtype=torch.int32)])
    longest = int(ends.diff().max())
    return inner.VarlenMetadata(ends, ends, longest, longest)


def dense(q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int], scale: float) -> Tensor:
    """Attention within the documents of POSITIONS, rows of all pairs."""
    document = (POSITIONS == 0).cumsum(1)
    at = torch.arange(q.shape[1])
    apart = at[:, None] - at
    attended = document[:, :, None] == document[:, None]
    attended &= (apart <= window[0]) | torch.tensor(window[0] < 0)
    attended &= (-apart <= window[1]) | torch.tensor(window[1] < 0)
    k, v = (t.repeat_interleave(2, 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    weights = scores.masked_fill(~attended[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


@pytest.mark.parametrize("window", [(-1, 0), (5, 0), (-1, -1)])
@pytest.mark.parametrize(("balancer", "ranks"), [("headtail", 2), ("headtail", 3), (None, 4)])
def test_torchtitan_varlen(window: tuple[int, int], balancer: str | None, ranks: int) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 24, heads, 8, dtype=torch.float64, generator=draw) for heads in (4, 2, 2)
    )
    tokens = torch.arange(48).view(2, 24)

    def rank(comm: Any) -> tuple[Tensor, Tensor]:
        module = inner.VarlenAttention()
        module.window_size = window
        apply_cp_to_forward([module], comm)
        extra = {"positions": POSITIONS, "attention_masks": metadata(POSITIONS)}
        own, labels, rest = prepare_context_parallel_input(
            tokens, tokens + 1, extra, comm, CPU, balancer
        )
        assert (labels == own + 1).all()
        assert (rest["positions"] == POSITIONS.flatten()[own]).all()
        mine = (t.flatten(0, 1)[own] for t in (q, k, v))
        return own, module(*mine, attention_masks=rest["attention_masks"], scale=0.5)

    expected = dense(q, k, v, window, 0.5).flatten(0, 1)
    found = run_ranks(ranks, rank)
    assert sorted(torch.cat([own.flatten() for own, _ in found]).tolist()) == list(range(48))
    for own, out in found:
        assert (out - expected[own]).abs().max() < 1e-10


class FlexAttention(torch.nn.Module):
    """Of torchtitan by its name."""


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda comm: apply_cp_to_forward([FlexAttention()], comm),
            "backend 'varlen', or 's",
        ),
        (lambda comm: prepared(comm, "ptrr"), "there are 'headtail' and None"),
        (lambda comm: prepared(comm, ptrr_mask_key="m"), "ptrr_mask_key='m' goes with 'ptrr'"),
        (lambda comm: prepared(comm, tokens=10), "10 tokens a row; give a multiple of 4"),
        (lambda comm: attended(comm, out_transform=len), "out_transform of type builtin_function"),
        (lambda comm: attended(comm), "no batch was cut over its group"),
        (lambda comm: [prepared(comm, how) for how in (None, "headtail")], "with None before"),
    ],
)
def test_what_torchtitan_is_refused(call: Any, says: str) -> None:
    kinds = ValueError, NotImplementedError
    assert all(says in said for said in refusals(2, call, kinds))


def prepared(
    comm: Any, balancer: str | None = "headtail", tokens: int = 8, ptrr_mask_key: str | None = None
) -> None:
    row = torch.zeros(1, tokens)
    given = row, row, {"positions": row}
    prepare_context_parallel_input(*given, comm, CPU, balancer, ptrr_mask_key)


def attended(comm: Any, **options: Any) -> None:
    module, q = inner.VarlenAttention(), torch.zeros(1, 4, 2, 8)
    apply_cp_to_forward([module], comm)
    module(q, q, q, attention_masks=metadata(torch.arange(8)[None]), **options)


def test_an_accelerator_without_context_parallelism() -> None:
    for config in (None, SimpleNamespace(cp_enabled=False)):
        with pytest.raises(ValueError, match=r"use_seqshard: accelerator has no context par"):
            accelerate.use_seqshard(SimpleNamespace(parallelism_config=config))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"attention": "sdpa"}, "attn_implementation is 'sdpa'; load it with"),
        ({"compute_loss_func": len}, "compute_loss_func is given labels that are not shifted"),
        ({"label_smoother": len}, "label_smoother is given labels that are not shifted"),
        ({"model_accepts_loss_kwargs": False}, "takes no num_items_in_batch"),
    ],
)
def test_what_a_trainer_is_refused(given: dict[str, Any], says: str) -> None:
    trainer: Any = accelerate.ContextParallel()
    attention = given.pop("attention", "seqshard")
    plain = {"compute_loss_func": None, "label_smoother": None, "model_accepts_loss_kwargs": True}
    config = SimpleNamespace(_attn_implementation=attention)
    vars(trainer).update(plain | given, model=SimpleNamespace(config=config), sequence_group=[0])
    with pytest.raises(ValueError) as error:
        trainer._prepare_context_parallel_inputs(None, {})
    assert says in str(error.value)


def test_a_trainer_of_whole_sequences_is_left_alone() -> None:
    context, inputs = accelerate.ContextParallel()._prepare_context_parallel_inputs(None, {"a": 1})
    with context() as nothing:
        assert nothing is None
    assert inputs == {"a": 1}


class Engine:
    """verl's, as much of it as the slot overrides."""

    more: Any = MappingProxyType({})
    ulysses_parallel_group: Any = None

    def _init_device_mesh(self) -> None:
        self.use_ulysses_sp = True

    def prepare_model_inputs(self, micro_batch: dict[str, Any]) -> tuple[dict, dict]:
        rolled, given = micro_batch["tokens"].roll(-1, 1), micro_batch["tokens"].float()
        inputs = {"input_ids": micro_batch["tokens"], "position_ids": POSITIONS.view(1, -1)}
        inputs |= {"attention_mask": None, **self.more}
        return inputs, {"input_ids_rmpad_rolled": rolled[0], "temperature_rmpad": given[0]}

    def forward_step(self, micro_batch: dict[str, Any]) -> Tensor:
        inputs, outputs = self.prepare_model_inputs(micro_batch)
        assert (current_cut() is None) == (self.ulysses_parallel_group is None)
        own = outputs["input_ids_rmpad_rolled"] * 1000 + inputs["position_ids"][0]
        assert (outputs["temperature_rmpad"] == inputs["input_ids"][0]).all()
        return self._gather_and_unpad_packed(own, 3)  # type: ignore[attr-defined]

    def _gather_and_unpad_packed(self, tensor: Tensor, pad_size: int) -> Tensor:
        raise AssertionError("verl's own is not called")


class SequenceEngine(verl.SequenceParallel, Engine):
    """The slot before an engine."""


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "balanced"])
def test_verls_micro_batches_are_whole_on_every_rank(layout: str) -> None:
    batch = {"tokens": torch.arange(48)[None]}

    def rank(comm: Any) -> Tensor:
        engine: Any = SequenceEngine()
        engine._init_device_mesh()
        assert not engine.use_ulysses_sp
        engine.ulysses_parallel_group, engine.sequence_layout = comm, layout
        return engine.forward_step(batch)

    expected = torch.arange(48).roll(-1) * 1000 + POSITIONS.flatten()
    engine: Any = SequenceEngine()
    for found in (engine.forward_step(batch), *run_ranks(3, rank)):
        assert found.tolist() == expected[:45].tolist()


@pytest.mark.parametrize(
    ("more", "batch", "says"),
    [
        ({"pixel_values": 1}, {}, "SequenceParallel: pixel_values: how to cut"),
        ({"shift_labels": 1}, {}, "train on text, with use_fused_kernels=False"),
        ({}, {"distillation_use_topk": True}, "distillation_use_topk: how to cut this"),
    ],
)
def test_what_verl_is_refused(more: dict[str, Any], batch: dict[str, Any], says: str) -> None:
    engine: Any = SequenceEngine()
    engine.more, engine.ulysses_parallel_group = more, [0]
    with pytest.raises(ValueError) as error:
        engine.forward_step({"tokens": torch.arange(48)[None], **batch})
    assert says in str(error.value)


def test_the_slot_goes_before_verls_engine() -> None:
    with pytest.raises(TypeError, match="Engine goes before SequenceParallel, whose methods"):
        type("Late", (Engine, verl.SequenceParallel), {})


def test_numbers_of_documents_go_with_their_positions() -> None:
    """As a padding-free collator gives both."""
    tokens, numbers = torch.zeros(1, 8, dtype=torch.long), torch.tensor([[0] * 3 + [1] * 5])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    batch = {"input_ids": tokens, "seq_idx": numbers}

    def rank(comm: Any) -> None:
        shard = shard_batch({**batch, "position_ids": positions}, comm)
        assert "seq_idx" not in shard.inputs
        with pytest.raises(ValueError, match="seq_idx alone does not name the documents"):
            shard_batch(batch, comm)

    run_ranks(2, rank)


def test_attentions_are_known_by_torchtitans_names() -> None:
    assert set(torchtitan.ATTENTIONS) == {"ScaledDotProductAttention", "VarlenAttention"}
