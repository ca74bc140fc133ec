"""Jobs for ``api/transformers``; see ``ranks.Pool``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import hf_models
import torch
import torch.distributed as dist
from rank_groups import device
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from annotations import ComputeConfig, parallelize
from annotations.engines.torch import Rates
from customized_ops.ring_attention import packed_batches
from customized_ops.ring_attention.api import transformers as seqshard

Answer = dict[str, Tensor]


def cut(model: nn.Module, given: dict[str, Tensor], group: Any, layout: str) -> Answer:
    """What :func:`hf_models.run` gives, from a rank's part of the batch."""
    mine = copy.deepcopy(model)  # ranks may be threads
    mine.set_attn_implementation("seqshard")
    mine.zero_grad()
    shard = seqshard.shard_batch(given, group, layout, dropout_seed=7)
    with shard.context():
        out = mine(**shard.inputs)
    out.loss.backward()
    seqshard.sum_gradients(mine.parameters(), group)
    loss = seqshard.sum_over_ranks(out.loss, group)
    return {"loss": loss, "logits": out.logits.detach(), **hf_models.gradients(mine)}


def imported() -> None:
    """A job of its own for the seconds that importing transformers takes."""


def _cut_and_joined(model: nn.Module, given: dict[str, Tensor], group: Any, layout: str) -> Answer:
    """:func:`cut` on each rank of ``group``, the logits of all of them."""
    parts = cut(model, given, group, layout)
    shards: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(shards, parts["logits"].cpu(), group=group)
    whole = seqshard.shard_batch(given, group, layout).layout.unshard(shards)
    return parts | {"logits": whole}


def cut_by_hand(
    name: str, case: str, layout: str, members: tuple[int, ...] | None = None
) -> tuple[Answer, Answer] | None:
    """On real ranks, all or some of them, and alone; None on the others."""
    group = dist.group.WORLD if members is None else dist.new_group(list(members))
    if members is not None and dist.get_rank() not in members:
        return None
    model = hf_models.tiny(name).to(device())
    given = {n: t.to(device()) for n, t in hf_models.batch(case).items()}
    alone = hf_models.run(model, "seqshard", given)
    return on_cpu(alone), on_cpu(_cut_and_joined(model, given, group, layout))


def cut_under_fsdp() -> tuple[Tensor, Tensor, int]:
    """The loss of a model in FSDP2's parts, in fp64, and alone; and how many masks its layers were
    given."""
    group, given = dist.group.WORLD, hf_models.batch("packed")
    alone = hf_models.run(hf_models.tiny("llama").float().double(), "seqshard", given)["loss"]
    model = hf_models.tiny("llama").float()
    model.set_attn_implementation("seqshard")
    masks: list[Any] = []

    def see(_: nn.Module, __: Any, given: dict[str, Any]) -> None:
        masks.append(given["attention_mask"])

    # Without a mesh it would take GPUs, where there are some, of which gloo knows nothing.
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    kind = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.float64)}
    for layer in model.model.layers:
        fully_shard(layer, **kind)
        layer.self_attn.register_forward_pre_hook(see, with_kwargs=True)
    fully_shard(model, **kind)
    shard = seqshard.shard_batch(given, group, "zigzag")
    with shard.context():
        loss = model(**shard.inputs).loss
    return seqshard.sum_over_ranks(loss, group), alone, len(set(map(id, masks)))


def cut_in_bf16(name: str, case: str, layout: str) -> tuple[Answer, Answer, Answer]:
    """In fp64 alone by transformers' own attention, in bf16 alone, and in bf16 on the ranks."""
    model = hf_models.tiny(name, std=0.05, hidden_size=256).to(device())
    given = {n: t.to(device()) for n, t in hf_models.batch(case, tokens=128).items()}
    truth = hf_models.run(model, "sdpa", given)
    low = copy.deepcopy(model).bfloat16()
    alone = hf_models.run(low, "seqshard", given)
    got = _cut_and_joined(low, given, dist.group.WORLD, layout)
    return on_cpu(truth), on_cpu(alone), on_cpu(got)


class Loss(nn.Module):
    """A model's loss alone, so that no rank has to hold the logits of all tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor, **given: Any) -> Tensor:
        return self.model(input_ids=input_ids, labels=labels, use_cache=False, **given).loss


def parallelized(
    name: str,
    case: str,
    policy: str,
    rows: int,
    shape: tuple[int, ...] | None = None,
    rates: Rates | None = None,
    lowered: bool = True,
) -> tuple[Answer, Answer, str]:
    """Cut by the engine, over a mesh of this shape, and alone: loss and gradients; and the plan."""
    model = hf_models.tiny(name, layers=1).to(device())
    model.set_attn_implementation("seqshard")
    loss_of = Loss(model)
    given = {n: t.to(device()) for n, t in hf_models.batch(case, rows).items()}
    alone = loss_of(**given)
    alone.backward()
    size = dist.get_world_size()
    told = {"mesh_shape": shape or (size,)} | ({} if rates is None else {"rates": rates})
    config = ComputeConfig(size, size, pas_config=told)
    module = parallelize(loss_of, given, policy, config, lowered=lowered)
    loss = module(**given)
    loss.backward()
    module.sync_grad()
    answers = (
        {"loss": found.detach(), **whole(hf_models.gradients(each))}
        for found, each in ((alone, loss_of), (loss, module))
    )
    return on_cpu(next(answers)), on_cpu(next(answers)), str(module.plan)


def packed_steps(
    lengths: Sequence[Sequence[int]], layers: int, lengths_too: bool = False, name: str = "llama"
) -> tuple[list[tuple[Answer, Answer]], str, int]:
    """One parallelized model on batches of these documents, each alone and over the ranks; its
    plan, and how many graphs it has.

    Args:
        lengths_too: pass cumulative lengths beside position ids, on the host.
    """
    model = hf_models.tiny(name, layers=layers).to(device())
    model.set_attn_implementation("seqshard")
    batches = []
    for each in lengths:
        given = hf_models.batch("plain", 1, sum(each))
        given["position_ids"] = torch.cat([torch.arange(n) for n in each])[None]
        given = {n: t.to(device()) for n, t in given.items()}
        if lengths_too:
            ends = torch.tensor([0, *each]).cumsum(0).to(torch.int32)
            given["cu_seq_lens_q"] = ends
        batches.append(given)
    size = dist.get_world_size()
    config = ComputeConfig(size, size, pas_config={"hoist": True})
    # Tracing takes longer than all else.
    module = parallelize(Loss(model), batches[0], "cp", config, lowered=not lengths_too)
    answers = []
    for given in batches:
        both = []
        for each in (Loss(model), module):
            each.zero_grad()
            loss = each(**given)
            loss.backward()
            if each is module:
                module.sync_grad()
            both.append(on_cpu({"loss": loss.detach(), **whole(hf_models.gradients(each))}))
        answers.append((both[0], both[1]))
    return answers, str(module.plan), len(module._programs.plans)


def packed_ahead(
    code: str, lengths: Sequence[Sequence[int]]
) -> tuple[list[tuple[float, float]], list[str]]:
    """Losses of a parallelized model of batches that were packed ahead, and those of cross entropy
    of its logits alone; and what was said meanwhile. ``code`` defines the PackedLoss of a model."""
    names: dict[str, Any] = {"torch": torch}
    exec(code, names)
    size, rank, losses = dist.get_world_size(), dist.get_rank(), []
    model = hf_models.tiny("llama", layers=1)
    model.set_attn_implementation("seqshard")
    ids = hf_models.batch("plain", 1, max(map(sum, lengths)))["input_ids"][0]
    documents: list[list[Any]] = [list(ids[: sum(each)].split(list(each))) for each in lengths]
    documents[-1] = [  # of which nothing is learned
        {"input_ids": row, "labels": torch.full_like(row, -100)} for row in documents[-1]
    ]

    def batches(**layout: str) -> Iterator[dict[str, Tensor]]:
        attends: Any = {"heads": (4, 2), "head_dim": 8, "whole": True, **layout}
        for made in packed_batches(documents, ranks=size, rank=rank, **attends):
            rows = {n: getattr(made, n)[None] for n in ("tokens", "targets", "positions")}
            count = torch.tensor(max(made.target_count, 1))
            yield {**rows, "cu_seqlens": made.cu_seqlens, "count": count}

    loss_of = names["PackedLoss"](model)
    module = parallelize(loss_of, next(batches()), "cp", ComputeConfig(size, size))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for given in batches(layout=module.plan.packed_layout):
            loss = module(**given)
            loss.backward()
            seen = {"input_ids": given["tokens"], "position_ids": given["positions"]}
            logits = model(**seen, use_cache=False).logits[0].float()
            wanted = nn.functional.cross_entropy(logits, given["targets"][0], reduction="sum")
            losses.append((loss.item(), wanted.item() / given["count"].item()))
    return losses, [str(w.message) for w in caught]


def whole(answer: Answer) -> Answer:
    """Of parameters that are kept in parts too."""
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in answer.items()}


def captured_wrongly(what: str) -> str:
    """The error of a call that cannot be captured."""
    model = hf_models.tiny("llama", layers=1)
    model.set_attn_implementation("seqshard")
    given = hf_models.batch("padded right" if what == "padding" else "plain")
    try:
        parallelize(Loss(model), given, "cp", ComputeConfig(2, 2))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def on_cpu(answer: Answer) -> Answer:
    """To send to the test."""
    return {name: t.cpu() for name, t in answer.items()}
