"""transformers models with recurrent layers: cut by hand and by the engine, against one rank.

What transformers computes in fp32 is in fp64 here: gates, norms, angles and its own recurrences. So
ranks, and a rank alone, agree with transformers' own functions to 1e-10.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import hf_jobs
import hybrid_jobs
import pytest
import torch
from hf_models import batch, run
from hybrid_models import MODELS, SIZES, in_fp64, tiny
from ranks import Pool, worlds
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from transformers import GraniteMoeHybridForCausalLM, Lfm2Config, Lfm2ForCausalLM
from transformers.masking_utils import causal_mask_function

from annotations import ComputeConfig
from annotations.engines.torch import plan_without_ranks
from customized_ops.ring_attention import Layout, run_ranks
from customized_ops.ring_attention.api import transformers as seqshard
from customized_ops.ring_attention.api.transformers.mask import make_mask
from customized_ops.ring_attention.api.transformers.traced import refuse_documents

pytest.importorskip("transformers", reason="transformers is not installed: '.[hf]'")


def same(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert got.keys() == want.keys()
    for name, expected in want.items():
        largest = expected.abs().max().item()
        assert largest > 1e-6, f"{name}: nothing to compare"
        error = (got[name] - expected).abs().max().item() / largest
        assert error < tolerance, f"{name} is off by {error:.1e}"


def by_hand(
    model: nn.Module, given: dict[str, Tensor], ranks: int, layout: str
) -> dict[str, Tensor]:
    """Loss and gradients over ranks that are threads."""
    with in_fp64(model):
        answer = run_ranks(ranks, lambda comm: hf_jobs.cut(model, given, comm, layout))[0]
    return {name: t for name, t in answer.items() if name != "logits"}


@pytest.mark.parametrize("name", MODELS)
def test_cut_by_hand(name: str) -> None:
    model, given = tiny(name), batch("plain", 2)
    with in_fp64(model):
        own = {n: t for n, t in run(model, "sdpa", given).items() if n != "logits"}
    for ranks, layout in ((1, "contiguous"), (2, "zigzag"), (4, "contiguous")):
        same(by_hand(model, given, ranks, layout), own)


@pytest.mark.parametrize("name", MODELS)
def test_documents_are_kept_apart(name: str) -> None:
    """Rows have different ones; each is what it is alone."""
    model, given = tiny(name), batch("packed", 2)
    alone = by_hand(model, given, 1, "contiguous")
    same(by_hand(model, given, 3, "zigzag"), alone)
    row = {n: t[:1] for n, t in given.items()}
    first = {n: t[:, :5] for n, t in row.items() if n != "labels"}
    with in_fp64(model), torch.no_grad():
        cuts = run_ranks(2, lambda comm: _logits(model, row, comm))
        model.set_attn_implementation("sdpa")
        expected = model(**first, use_cache=False).logits
    whole = Layout.zigzag(22, 2).unshard(cuts)
    same({"logits": whole[:, :5]}, {"logits": expected})


def _logits(model: nn.Module, given: dict[str, Tensor], comm: object) -> Tensor:
    shard = seqshard.shard_batch(given, comm, "zigzag")
    model.set_attn_implementation("seqshard")
    with shard.context(), torch.no_grad():
        return model(**shard.inputs).logits


def test_what_cannot_be_cut_is_refused() -> None:
    model = tiny("qwen3 next")
    model.set_attn_implementation("seqshard")
    given = batch("padded left")

    def refused(comm: object) -> str:
        shard = seqshard.shard_batch(given, comm, "contiguous")
        with shard.context(), pytest.raises(NotImplementedError) as error:
            model(**shard.inputs)
        return str(error.value)

    assert all("padding before tokens" in said for said in run_ranks(2, refused))
    right = batch("padded right")
    found = by_hand(tiny("qwen3 next"), right, 2, "zigzag")
    same(found, by_hand(tiny("qwen3 next"), right, 1, "zigzag"))


def checkpointed(
    name: str, batches: list[dict[str, Tensor]], reentrant: bool | None, together: bool = False
) -> list[dict[str, Tensor]]:
    """Gradients of each batch over two ranks, whose backwards run when the contexts are over: each
    before the next forward, or all together at the end."""

    whole = tiny(name).train()

    def rank(comm: object) -> list[dict[str, Tensor]]:
        model = copy.deepcopy(whole)
        model.set_attn_implementation("seqshard")
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        losses, found = [], []
        for given in batches:
            shard = seqshard.shard_batch(given, comm, "zigzag")
            with shard.context():
                losses.append(model(**shard.inputs).loss)
            if not together:
                losses.pop().backward()
                found.append({n: p.grad for n, p in model.named_parameters()})
                model.zero_grad()
        for loss in losses:
            loss.backward()
        return [*found, *([{n: p.grad for n, p in model.named_parameters()}] if together else [])]

    with in_fp64(whole):
        return run_ranks(2, rank)[0]


@pytest.mark.parametrize("name", ["granite 4", "qwen3 next"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_computed_again_outside_of_the_context(name: str, reentrant: bool) -> None:
    """As they ran first; of other documents in each batch."""
    batches = [batch("plain", 1), batch("packed", 1), batch("plain", 2)]
    for found, expected in zip(
        checkpointed(name, batches, reentrant), checkpointed(name, batches, None), strict=True
    ):
        same(found, expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_batches_that_wait_for_their_backwards(reentrant: bool) -> None:
    """Each layer is computed again by the cut of its own batch."""
    packed, plain = batch("packed", 1), batch("plain", 1)
    for batches in ([packed, packed], [packed, plain], [plain, packed, plain]):
        (found,) = checkpointed("granite 4", batches, reentrant, together=True)
        (expected,) = checkpointed("granite 4", batches, None, together=True)
        same(found, expected)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("cut", [True, False])
def test_other_checkpointing_is_refused_where_tokens_are_cut(reentrant: bool, cut: bool) -> None:
    """It does not carry the cut, so nobody knows how a layer ran; whole inputs it may have."""
    model, given = tiny("granite 4").train(), batch("plain", 1)
    model.set_attn_implementation("seqshard")
    layer = next(m for m in model.model.layers if getattr(m, "mamba", None) is not None)
    whole = layer.forward
    layer.forward = lambda x, **more: checkpoint(partial(whole, **more), x, use_reentrant=reentrant)
    shard = seqshard.shard_batch(given, None)
    with in_fp64(model):
        with shard.context() if cut else nullcontext():
            loss = model(**{**(shard.inputs if cut else given), "use_cache": False}).loss
        if cut:
            with pytest.raises(ValueError, match="call gradient_checkpointing_enable"):
                loss.backward()
        else:
            loss.backward()
            assert all(p.grad is not None for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_documents_by_position_ids_alone_are_refused_by_the_engine(name: str) -> None:
    """Recurrent layers do not look at them. (Those of Granite 4 and its attention are not shown
    them.)"""
    model, given = hf_jobs.Loss(tiny(name)), batch("packed", 1)
    model.model.set_attn_implementation("seqshard")
    with pytest.raises(ValueError, match="recurrent layers do not look at them; give cu_seq_lens"):
        plan_without_ranks(model, given, "cp", ComputeConfig(2, 2))
    ends = torch.tensor([0, 5, 22], dtype=torch.int32)
    given |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    assert "wrap_gated_" in str(plan_without_ranks(model, given, "cp", ComputeConfig(2, 2)))


def test_documents_by_position_ids_that_attention_is_not_shown() -> None:
    """A Granite 4 without recurrent layers."""
    config = tiny("granite 4").config
    config.layer_types = ["full_attention"] * 2
    model, given = hf_jobs.Loss(GraniteMoeHybridForCausalLM(config).double()), batch("packed", 1)
    model.model.set_attn_implementation("seqshard")
    with pytest.raises(ValueError, match="may begin documents, and the model's attention is not"):
        plan_without_ranks(model, given, "cp", ComputeConfig(2, 2))
    ends = torch.tensor([0, 5, 22], dtype=torch.int32)
    given |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    assert "wrap_ring_attn_varlen" in str(
        plan_without_ranks(model, given, "cp", ComputeConfig(2, 2))
    )


def test_positions_of_pixels_begin_no_documents_in_the_engine() -> None:
    """Of three dims, as of models that see images, which are one document a row."""
    mask = make_mask(1, 6, 6, mask_function=causal_mask_function)
    with FakeTensorMode():
        positions = torch.empty(3, 1, 6, dtype=torch.long)
        refuse_documents(mask, positions, None, ["conv"], True)
        with pytest.raises(NotImplementedError, match="layers of type conv"):
            refuse_documents(mask, positions[0], None, ["conv"], True)
        with pytest.raises(ValueError, match="recurrent layers do not look at them"):
            refuse_documents(mask, positions[0], None, [], True)
        refuse_documents(mask, positions[0], torch.empty(3), [], True)


@pytest.mark.slow
def test_layers_that_mix_tokens_otherwise_have_no_documents_in_the_engine() -> None:
    """Convolutions alone, of LFM2: transformers does not keep documents apart there."""
    seqshard.register()
    config = Lfm2Config(**SIZES, layer_types=["conv", "full_attention"], block_multiple_of=8)
    model, given = hf_jobs.Loss(Lfm2ForCausalLM(config).double()), batch("packed", 1)
    model.model.set_attn_implementation("seqshard")
    by_ends = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 5, 22]).int())
    tokens = {name: t for name, t in given.items() if name != "position_ids"}
    for documents in (given, tokens | by_ends):
        with pytest.raises(NotImplementedError, match="layers of type conv, which do not keep doc"):
            plan_without_ranks(model, documents, "auto", ComputeConfig(2, 2))
    plan_without_ranks(model, tokens, "auto", ComputeConfig(2, 2))


def test_one_device_is_left_to_transformers() -> None:
    model, given = tiny("granite 4"), batch("plain", 2)
    with in_fp64(model):
        same(run(model, "seqshard", given), run(model, "sdpa", given))
    tokens = given["input_ids"][:1, :6]
    generated = [
        model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
        for name in ("seqshard", "sdpa")
        if model.set_attn_implementation(name) is None
    ]
    assert torch.equal(*generated)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "policy", "packed"),
    [
        ("qwen3 next", "cp", False),
        ("qwen3 next", "cp", True),
        ("qwen3 next", "auto", False),
        ("qwen3 next", "ulysses", False),
        ("qwen3 next", {"wrap_ring*": "l", "wrap_gated*": "g", "*.up_proj.weight": 0}, False),
        ("granite 4", "auto", False),
        ("granite 4", "cp", False),
        ("granite 4", "cp", True),
        ("granite 4", "ulysses", False),
        ("nemotron h", "cp", False),
        ("nemotron h", "cp", True),
        ("nemotron h", "auto", False),
        ("nemotron h", "ulysses", False),
        ("nemotron h", {"wrap_ring*": "l", "wrap_gated*": "g", "*.up_proj.weight": 0}, False),
        ("bamba", "cp", True),
        ("zamba 2", "cp", False),
        ("falcon h1", "cp", False),
    ],
)
@worlds(cpus=[2, 4], gpus=[])
def test_parallelized(ranks: Pool, name: str, policy: Any, packed: bool) -> None:
    ranks.run(hf_jobs.imported)
    for alone, found, plan in ranks.run(hybrid_jobs.parallelized, name, policy, packed, False):
        same(found, alone)
        if policy == "cp":
            recurrent = "gated_delta_rule" if name == "qwen3 next" else "gated_linear_attn"
            for function in (f"wrap_{recurrent}_func", "wrap_causal_conv1d_func"):
                assert any(
                    line.startswith(function) and f"l / {ranks.size}" in line
                    for line in plan.splitlines()
                )


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@worlds(cpus=[4], gpus=[])
def test_layers_in_two_orders(ranks: Pool, packed: bool) -> None:
    """Attention between two runs of recurrent layers: hidden states move before and after it."""
    ranks.run(hf_jobs.imported)
    given = "nemotron h", "cp", packed, True
    for alone, found, plan in ranks.run(hybrid_jobs.parallelized, *given):
        same(found, alone)
        assert "to_order" in plan and "of 4 of these calls in natural order" in plan


def test_models_are_what_they_say() -> None:
    both = {"linear_attention", "full_attention"}
    for name in MODELS:
        kinds = set(tiny(name).config.layer_types)
        assert kinds >= both or "hybrid" in kinds
