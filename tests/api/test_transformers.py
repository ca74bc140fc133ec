"""Hugging Face models by seqshard attention: equal to sdpa and eager, alone and over ranks."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from dense import assert_same
from packed_jobs import counted
from ranks import Pool, worlds
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")

import hf_jobs
from hf_models import BY_EAGER, TOKENS, batch, run, tiny
from transformers import DataCollatorWithFlattening, StaticCache

from annotations.engines.torch import Link, Rates
from customized_ops.ring_attention import (
    AttnMask,
    DisagreementError,
    Layout,
    PackedBatch,
    packed_batches,
    run_ranks,
)
from customized_ops.ring_attention.api import transformers as seqshard
from customized_ops.ring_attention.api.transformers import mask as transformers_mask
from customized_ops.ring_attention.api.transformers.mask_function import MaskDescription
from tests.kernels.conformance import assert_near

# Models whose norms multiply fp32 values, or whose softmax is fp32 in eager mode, are not exact.
TOLERANCE = {"gemma2": 1e-6, "llama4": 1e-6, "llama both ways": 1e-6, "cut norms": 1e-6}


def same(name: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for what, expected in want.items():
        # The loss is of fp32 logits.
        tolerance = 2e-6 if what == "loss" else TOLERANCE.get(name, 1e-10)
        largest = expected.abs().max().item()
        assert largest > 1e-4, f"{what}: nothing to compare"
        difference = (got[what] - expected).abs().max().item() / max(1.0, largest)
        assert difference < tolerance, f"{name}, {what}: {difference:.1e}"


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


def refused(changed: dict[str, Any], name: str = "llama", case: str = "plain") -> str:
    model = tiny(name, layers=1)
    with pytest.raises((ValueError, NotImplementedError)) as error:
        run(model, "seqshard", batch(case) | changed)
    return str(error.value)


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


@worlds(cpus=[2], gpus=[2, 4])
def test_cut_by_hand_on_real_ranks(ranks: Pool) -> None:
    ranks.run(hf_jobs.imported)
    for name, case in (("mistral", "packed"), ("llama", "padded left")):
        for alone, got in ranks.run(hf_jobs.cut_by_hand, name, case, "zigzag"):
            same(name, got, alone)


@worlds(cpus=[2], gpus=[])
def test_fsdp_passes_a_mask_on_as_it_is(ranks: Pool) -> None:
    """With mixed precision it copies dataclasses among the arguments of each layer."""
    ranks.run(hf_jobs.imported)
    for loss, alone, masks in ranks.run(hf_jobs.cut_under_fsdp):
        torch.testing.assert_close(loss, alone.to(loss.dtype), rtol=1e-6, atol=0)
        assert masks == 1


@pytest.mark.slow
@worlds(cpus=[4], gpus=[4])
def test_a_group_that_does_not_begin_at_rank_0(ranks: Pool) -> None:
    replies = ranks.run(hf_jobs.cut_by_hand, "mistral", "packed", "zigzag", (1, 2))
    assert [reply is None for reply in replies] == [True, False, False, True]
    for alone, got in filter(None, replies):
        same("mistral", got, alone)


@pytest.mark.parametrize(
    ("name", "case"),
    [("llama", "packed"), pytest.param("mistral", "plain", marks=pytest.mark.slow)],
)
@worlds(cpus=[2], gpus=[2])
def test_bf16(ranks: Pool, name: str, case: str) -> None:
    """Over ranks at most twice as far from fp64 as on one, by the kernel that is the fastest."""
    ranks.run(hf_jobs.imported)
    for truth, alone, got in ranks.run(hf_jobs.cut_in_bf16, name, case, "zigzag"):
        for what, want in truth.items():
            assert want.abs().max() > 1e-5, f"{what}: nothing to compare"
            assert_near(f"{name}, {what}", got[what], want, alone[what], torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "case", "policy", "rows", "lowered"),
    [
        ("llama", "plain", "cp", 3, False),
        pytest.param("llama", "plain", "cp", 3, True, marks=pytest.mark.slow),
        pytest.param("qwen3", "plain", "dp", 2, True, marks=pytest.mark.slow),
        pytest.param("mistral", "packed", "cp", 2, True, marks=pytest.mark.slow),
    ],
)
@worlds(cpus=[2], gpus=[2])
def test_parallelized(
    ranks: Pool, name: str, case: str, policy: str, rows: int, lowered: bool
) -> None:
    """The plan cuts attention and the loss, whose labels are shifted across the cut. A lowered
    Llama is in the next test, too."""
    ranks.run(hf_jobs.imported)
    given = name, case, policy, rows, None, None, lowered
    for alone, got, plan in ranks.run(hf_jobs.parallelized, *given):
        same(name, got, alone)
        split = "b" if policy == "dp" else "l"
        assert f" {split} / {ranks.size}" in plan


@pytest.mark.thin(2)
@pytest.mark.parametrize("lengths_too", [False, True])
@pytest.mark.parametrize("layers", [1, pytest.param(2, marks=pytest.mark.slow)])
@worlds(cpus=[2], gpus=[2])
def test_parallelized_with_documents_that_change(
    ranks: Pool, layers: int, lengths_too: bool
) -> None:
    """One graph, which puts each batch in an order of its own at the inputs, and nowhere else. It
    finds documents in position ids, or is told their lengths, which are on the host."""
    ranks.run(hf_jobs.imported)
    lengths = [(2,) * 11, (22,), (3, 9, 10), (15, 7)]
    for answers, plan, graphs in ranks.run(hf_jobs.packed_steps, lengths, layers, lengths_too):
        assert graphs == 1
        assert "layout: balanced by document over 22 tokens, permuted once at: " in plan
        assert "natural order again" not in plan
        for alone, got in answers:
            same("llama", got, alone)


class NoReads(TorchDispatchMode):
    """Refuses what a GPU would be waited for: a number or a truth that is read from a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "read from a tensor"
        return func(*args, **(kwargs or {}))


def forwards(
    batches: Sequence[Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Tensor], list[Tensor]]:
    """A model's loss of what each rank's shard_batch is given, with its layout; and the tensors
    among the inputs, there and in its forward, that were copied to the host."""
    model, copied, to_host = tiny("llama").eval(), list[Tensor](), Tensor.cpu

    def rank(comm: Any) -> tuple[Tensor, list[Tensor]]:
        mine = copy.deepcopy(model)
        mine.set_attn_implementation("seqshard")
        given, layout = batches[comm.rank]
        shard = seqshard.shard_batch(given, comm, layout)
        with shard.context(), NoReads():
            loss = mine(**shard.inputs).loss.detach()
        named = vars(given) if isinstance(given, PackedBatch) else given
        on_device = [t for t in (*named.values(), *shard.inputs.values()) if isinstance(t, Tensor)]
        return loss, [t for t in on_device if t is not named.get("cu_seqlens")]

    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "cpu", lambda t: copied.append(t) or to_host(t))
        losses, inputs = zip(*run_ranks(2, rank), strict=True)
    places = {t.data_ptr() for each in inputs for t in each}
    return list(losses), [t for t in copied if t.data_ptr() in places]


DOCUMENTS = [[5, 9, 2, 7, 3], [4] * 9, [1, 2, 3], [8]]
AHEAD: Any = {"ranks": 2, "heads": (4, 2), "head_dim": 8}


@pytest.mark.parametrize("whole", [False, True])
def test_a_loader_plans_ahead(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it gives is cut, and attention finds the plan; losses are those of each document.
    Position ids are not read: they are known from the lengths."""
    model, losses = tiny("llama").eval(), []
    made = [next(packed_batches([DOCUMENTS], rank=n, whole=whole, **AHEAD)) for n in range(2)]
    with counted() as counts:
        found, copied = forwards([(batch, None) for batch in made], monkeypatch)
    assert counts["plans"] == 0 and not copied
    for each in DOCUMENTS[:3]:
        ids = torch.tensor([each])
        losses.append(model(input_ids=ids, labels=ids).loss * (len(each) - 1))
    expected = sum(losses).item() / made[0].target_count
    assert sum(found).item() == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("told", ["position_ids", "cu_seq_lens_q", "both", "nothing"])
def test_position_ids_are_read_once_at_most(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not at all where lengths are given in their place."""
    made = next(packed_batches([DOCUMENTS], rank=0, whole=True, **AHEAD))
    given = {"input_ids": made.tokens[None], "labels": made.targets.clamp(min=0)[None]}
    if told in ("position_ids", "both"):
        given["position_ids"] = made.positions[None]
    if told in ("cu_seq_lens_q", "both"):
        given["cu_seq_lens_q"] = made.cu_seqlens
    _, copied = forwards([(dict(given), made.layout)] * 2, monkeypatch)
    assert len(copied) == (2 if "position_ids" in given else 0)  # once a rank


def test_a_packed_batch_on_a_device_is_not_read() -> None:
    """The device is "meta", from which nothing can be copied."""
    made = [next(packed_batches([DOCUMENTS], rank=n, **AHEAD)).to("meta") for n in range(2)]

    def rank(comm: Any) -> None:
        batch = made[comm.rank]
        shard = seqshard.shard_batch(batch, comm)
        assert all(shard.inputs[n].is_meta for n in ("input_ids", "position_ids", "shift_labels"))
        with shard.context() as cut:
            ids = shard.inputs["position_ids"]
            cut.check(torch.Size([1, ids.shape[1], 4, 8]), ids)
            assert cut.batch_mask(MaskDescription(right=0), 1).mask == batch.plan.mask
            cut.asked.add("mask")
            with pytest.raises(NotImplementedError):  # of another tensor nothing is known
                cut.check(torch.Size([1, ids.shape[1], 4, 8]), ids.clone())

    run_ranks(2, rank)


@pytest.mark.parametrize(
    ("ranks", "layout", "message"),
    [
        (3, None, "laid out over 3 ranks"),
        (2, "zigzag", "give packed_batches ranks and layout instead"),
        (2, Layout.contiguous(18, 2), "give packed_batches ranks and layout instead"),
    ],
)
def test_packed_batches_of_other_layouts_are_refused(ranks: int, layout: Any, message: str) -> None:
    made = next(packed_batches([DOCUMENTS], rank=0, **{**AHEAD, "ranks": ranks}))

    def rank(comm: Any) -> str:
        with pytest.raises(ValueError) as error:
            seqshard.shard_batch(made, comm, layout)
        return str(error.value)

    assert all(message in said for said in run_ranks(2, rank))


# Slow enough that "auto" cuts a small model.
SLOW = Rates(3e7, 3e7, 1e8, (Link(0.0, 1e9),))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("policy", ["cp", "dp", "tp", "ulysses", "auto", "hybrid"])
@worlds(cpus=[2, 4], gpus=[2, 4])
def test_parallelized_by_every_policy(ranks: Pool, policy: str, name: str) -> None:
    """On all ranks in a row, and of four as 2 x 2."""
    ranks.run(hf_jobs.imported)
    shapes = [(ranks.size,)] + [(2, 2)] * (ranks.size == 4)
    for shape in shapes:
        if policy == "hybrid" and len(shape) == 1:
            continue
        given = name, "plain", policy, 4 if policy == "dp" else 3, shape, SLOW
        for alone, got, plan in ranks.run(hf_jobs.parallelized, *given):
            same("cut norms", got, alone)
            assert re.search(r" (S\d|[a-z]+ / \d)", plan), "nothing is cut"


def test_what_cannot_be_captured_is_refused(two_ranks: Pool) -> None:
    for said in two_ranks.run(hf_jobs.captured_wrongly, "padding"):
        assert "attention_mask in a captured graph is not supported" in said
