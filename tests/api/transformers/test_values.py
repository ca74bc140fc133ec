"""Hugging Face models by seqshard attention: equal to sdpa and eager, alone and over ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from dense import assert_same
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")

import hf_jobs
from hf_models import BY_EAGER, TOKENS, batch, run, tiny
from transformers import DataCollatorWithFlattening, StaticCache

from customized_ops.ring_attention import AttnMask, Layout, run_ranks
from customized_ops.ring_attention.api import transformers as seqshard
from customized_ops.ring_attention.api.transformers import mask as transformers_mask

from .same import same


def test_a_difference_is_found() -> None:
    want = {"loss": torch.ones(()), "weight": torch.ones(3)}
    for what in want:
        wrong = want | {what: want[what] + 1e-5}
        with pytest.raises(AssertionError, match=what):
            same("llama", wrong, want)


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("name", "case"),
    [
        *[(name, case) for name in ("llama", "qwen3") for case in ("plain", "packed")],
        *[("mistral", case) for case in ("packed", "padded right", "padded left")],
        ("qwen3", "padded inside"),
        ("gemma2", "plain"),
        ("gemma2", "packed"),
        ("gpt-oss", "plain"),
        ("gpt-oss", "padded right"),
        ("llama4", "packed"),
        ("llama4", "padded left"),
        ("llama both ways", "plain"),
        ("llama both ways", "padded right"),
    ],
)
def test_equals_transformers_own_on_any_ranks(name: str, case: str) -> None:
    """One device, then 2 and 4 in-process ranks."""
    model, given = tiny(name), batch(case)
    attended = given.get("attention_mask", torch.ones(3, TOKENS)) == 1

    def counted(answer: dict[str, Tensor]) -> dict[str, Tensor]:
        return answer | {"logits": answer["logits"][attended]}  # of padding they mean nothing

    want = counted(run(model, "eager" if name in BY_EAGER else "sdpa", given))
    same(name, counted(run(model, "seqshard", given)), want)
    for size, layout in ((2, "zigzag"), (4, "contiguous")):
        parts = run_ranks(size, lambda comm, by=layout: hf_jobs.cut(model, given, comm, by))
        where = getattr(Layout, layout)(TOKENS, size)
        whole = where.unshard([part["logits"] for part in parts])
        same(name, counted(parts[0] | {"logits": whole}), want)


def test_balanced_by_name() -> None:
    """Of the documents that all rows have."""
    model, given = tiny("llama"), batch("packed", rows=1)
    parts = run_ranks(2, lambda comm: hf_jobs.cut(model, given, comm, "balanced"))
    where = Layout.balanced(AttnMask.varlen([0, 5, TOKENS], causal=True), 2)
    whole = where.unshard([part["logits"] for part in parts])
    same("llama", parts[0] | {"logits": whole}, run(model, "sdpa", given))
    with pytest.raises(ValueError, match="rows with the same documents"):
        seqshard.shard_batch(batch("packed"), None, "balanced")
    with pytest.raises(ValueError, match="layout is of 9 tokens, the batch's rows have 22"):
        seqshard.shard_batch(batch("plain"), None, Layout.contiguous(9, 1))


def test_documents_do_not_see_each_other_in_gpt_oss() -> None:
    """Whose own masks know nothing of position ids, but under flash attention."""
    model, given = tiny("gpt-oss", layers=1), batch("packed")
    whole = run(model, "seqshard", given)["logits"]
    for row, positions in enumerate(given["position_ids"]):
        starts = [*torch.where(positions == 0)[0].tolist(), TOKENS]
        for start, stop in pairwise(starts):
            model.set_attn_implementation("eager")
            alone = model(given["input_ids"][row : row + 1, start:stop], use_cache=False).logits
            assert (whole[row, start:stop] - alone[0]).abs().max() < 1e-10


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
def test_dropout_and_checkpoints_over_ranks() -> None:
    """Dropout draws by token; layers that are run again in the backward know their mask still."""
    model, given = tiny("llama dropout"), batch("packed")
    model.train()
    alone = hf_jobs.cut(model, given, None, "contiguous")
    no_dropout = hf_jobs.cut(tiny("llama"), given, None, "contiguous")
    assert (alone["logits"] - no_dropout["logits"]).abs().max() > 1e-3
    model.gradient_checkpointing_enable()
    parts = run_ranks(2, lambda comm: hf_jobs.cut(model, given, comm, "contiguous"))
    whole = Layout.contiguous(TOKENS, 2).unshard([part["logits"] for part in parts])
    same("llama", parts[0] | {"logits": whole}, alone)


@pytest.mark.parametrize(("name", "layout"), [("llama", "zigzag"), ("llama4", "contiguous")])
def test_a_shard_outside_of_its_context(name: str, layout: str) -> None:
    """Its tokens would see one another alone, which nothing would show."""
    model, given = tiny(name, layers=1), batch("plain")
    model.set_attn_implementation("seqshard")

    def refused(comm: Any) -> None:
        inputs = seqshard.shard_batch(given, comm, layout).inputs
        with pytest.raises(ValueError, match=r"model within `with shard\.context\(\):`"):
            model(**inputs)

    run_ranks(2, refused)
    model(**seqshard.shard_batch(given, None).inputs)  # of one rank it is the whole


def test_another_attention_inside_of_the_context() -> None:
    """It would see a rank's own tokens alone."""
    model, given = tiny("llama", layers=1), batch("plain")
    model.set_attn_implementation("sdpa")

    def refused(comm: Any) -> None:
        shard = seqshard.shard_batch(given, comm)
        with pytest.raises(ValueError, match="no attention ran over the ranks"), shard.context():
            model(**shard.inputs)

    run_ranks(2, refused)


def test_the_collator_that_flattens() -> None:
    """Its position ids and cu_seq_lens, alone and over ranks."""
    g = torch.Generator().manual_seed(2)
    documents = [torch.randint(1, 48, (n,), generator=g).tolist() for n in (5, 9, 8)]
    features = [{"input_ids": ids, "labels": ids} for ids in documents]
    collate = DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=True)
    given, model = dict(collate(features)), tiny("mistral")
    plain = {n: given[n] for n in ("input_ids", "labels", "position_ids")}
    want = run(model, "sdpa", plain)
    same("mistral", run(model, "seqshard", given), want)
    del given["position_ids"]
    model.zero_grad()
    parts = run_ranks(2, lambda comm: hf_jobs.cut(model, given, comm, "zigzag"))
    whole = Layout.zigzag(TOKENS, 2).unshard([part["logits"] for part in parts])
    same("mistral", parts[0] | {"logits": whole}, want)


STATIC = {"cache_implementation": "static", "disable_compile": True}


@pytest.mark.parametrize("case", ["plain", "padded left"])
@pytest.mark.parametrize(
    ("name", "cache"),
    [("llama", {}), ("mistral", {}), ("gpt-oss", {}), ("llama", STATIC), ("mistral", STATIC)],
)
def test_generate(name: str, cache: dict[str, Any], case: str) -> None:
    model, given = tiny(name), batch(case)
    told = {n: given[n][:, :12] for n in ("input_ids", "attention_mask") if n in given}
    asked = dict(max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    found = []
    for implementation in ("eager" if name in BY_EAGER else "sdpa", "seqshard"):
        model.set_attn_implementation(implementation)
        found.append(model.generate(**told, **asked, output_logits=True, **cache))
    assert torch.equal(*(each.sequences for each in found))
    want, got = (torch.stack(each.logits) for each in found)  # in fp32
    assert_same("logits", got, want, 2e-6)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_prompt_in_chunks(name: str) -> None:
    """A static cache counts the tokens in it where a mask was told of them."""
    model, tokens = tiny(name), batch("plain")["input_ids"]
    found = []
    for implementation in ("sdpa", "seqshard"):
        model.set_attn_implementation(implementation)
        cache = StaticCache(config=model.config, max_cache_len=TOKENS + 3)
        chunks = tokens.split([9, 1, TOKENS - 10], 1)
        with torch.no_grad():
            outs = [model(input_ids=chunk, past_key_values=cache).logits for chunk in chunks]
        found.append(torch.cat(outs, 1))
    want, got = found
    assert_same("logits", got, want)


def test_a_forward_looks_at_its_batch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = tiny("llama"), batch("packed")
    copies: list[Any] = []
    host_copy = transformers_mask.host_copy
    monkeypatch.setattr(transformers_mask, "host_copy", lambda t: copies.append(t) or host_copy(t))
    found = run(model, "seqshard", given)
    assert len(model.model.layers) == 2 and len(copies) == 1
    # With a fresh cache transformers' own masks do not look at position ids; these do.
    same("llama", run(model, "seqshard", given | {"use_cache": True}), found)


def test_a_cut_forward_asks_once_what_its_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[nn.Module] = []
    monkeypatch.setattr(seqshard, "_refuse_for_parts", lambda module, _: asked.append(module))
    model = tiny("llama")
    run_ranks(1, lambda comm: hf_jobs.cut(model, batch("plain"), comm, "contiguous"))
    assert len(model.model.layers) == 2 and len(asked) == 1
