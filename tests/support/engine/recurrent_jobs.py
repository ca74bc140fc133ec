"""Jobs for the tests of linear attention and convolutions over real ranks; see ``ranks.Pool``."""

from __future__ import annotations

import traceback
from dataclasses import replace
from typing import Any

import conv_cases
import linear_cases
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_groups import device, in_their_own_time
from steps import gradients, over_all, refusal, whole
from torch import Tensor, nn

from annotations import parallelize
from annotations.engines.torch import CaptureError
from customized_ops.causal_conv1d import wrap_causal_conv1d_func
from customized_ops.linear_attention import wrap_gated_delta_rule_func, wrap_gated_linear_attn_func
from customized_ops.ring_attention import wrap_ring_attn_func, wrap_ring_attn_varlen_func

Answer = dict[str, Tensor]


class Mixer(nn.Module):
    """A convolution, then the delta rule or gates alone, added to what came in; ``dims``: dk and
    dv of 2 heads of q and k, and 4 of v."""

    def __init__(self, dim: int, delta: bool, dims: tuple[int, int] = (4, 16)) -> None:
        super().__init__()
        self.delta, (dk, dv) = delta, dims
        self.sizes = 2 * dk, 2 * dk, 4 * dv
        self.project = nn.Linear(dim, sum(self.sizes))
        self.gates = nn.Linear(dim, 8 if delta else 4)
        self.filter = nn.Parameter(torch.randn(sum(self.sizes), 4) * 0.5)
        self.bias = nn.Parameter(torch.randn(sum(self.sizes)) * 0.1)
        self.out = nn.Linear(4 * dv, dim)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        mixed = wrap_causal_conv1d_func(self.project(x), self.filter, self.bias, "silu", cu_seqlens)
        q, k, v = mixed.split(self.sizes, -1)
        q, k = (F.normalize(t.unflatten(-1, (2, -1)), dim=-1) for t in (q, k))
        v, gates = v.unflatten(-1, (4, -1)), self.gates(x)
        if self.delta:
            g, beta = gates.chunk(2, -1)
            given = q, k, v, F.logsigmoid(g), beta.sigmoid()
            y = wrap_gated_delta_rule_func(*given, cu_seqlens=cu_seqlens)
        else:
            y = wrap_gated_linear_attn_func(q, k, v, F.logsigmoid(gates), cu_seqlens=cu_seqlens)
        return x + self.out(y.flatten(2))


class Attention(nn.Module):
    """Causal attention, added to what came in."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)) for t in self.qkv(x).chunk(3, -1))
        if cu_seqlens is None:
            y = wrap_ring_attn_func(q, k, v)
        else:
            packed = (t.squeeze(0) for t in (q, k, v))
            y = wrap_ring_attn_varlen_func(*packed, cu_seqlens, cu_seqlens).unsqueeze(0)
        return x + self.out(y.flatten(2))


class Hybrid(nn.Module):
    """Embedding, layers, loss. The layers: "d" of the delta rule, "g" of gates alone, "a" of
    attention."""

    def __init__(self, layers: str, dim: int = 16, dims: tuple[int, int] = (4, 16)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(32, dim), nn.Linear(dim, 32)
        made = (Attention(dim) if kind == "a" else Mixer(dim, kind == "d", dims) for kind in layers)
        self.layers = nn.ModuleList(made)
        self.double()

    def forward(self, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, cu_seqlens)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def inputs(batch: int, length: int, lengths: tuple[int, ...] = ()) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(32, (2, batch, sum(lengths) or length), generator=draw)
    given = {"tokens": tokens[0], "targets": tokens[1]}
    if lengths:
        given["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
    return {name: t.to(device()) for name, t in given.items()}


def _answer(loss: Tensor, module: nn.Module) -> Answer:
    return {"loss": whole(loss), **gradients(module)}


def _alone_and_by(module: Any, model: nn.Module, given: Any) -> tuple[Answer, Answer]:
    """Loss and gradients of a model, and of what the engine made of it."""
    answers = []
    for run in (model, module):
        run.zero_grad()
        loss = run(**given)
        loss.backward()
        if run is module:
            module.sync_grad()
        answers.append(_answer(loss, run))
    return answers[0], answers[1]


def parallelized(
    policy: Any,
    layers: str,
    batch: int,
    lengths: tuple[int, ...],
    options: dict[str, Any],
    lowered: bool = True,
) -> tuple[Answer, Answer, str]:
    """Loss and gradients alone and by the engine, and its plan.

    Args:
        layers: as :class:`Hybrid` takes them.
        lengths: of documents; none for a batch of 24 tokens a row.
        options: the config's ``pas_config``.
    """
    given, model = inputs(batch, 24, lengths), Hybrid(layers).to(device())
    told = over_all(pas_config=options)
    module = parallelize(model, given, policy, told, lowered=lowered)
    return *_alone_and_by(module, model, given), str(module.plan)


def in_bf16(layers: str, policy: Any, lengths: tuple[int, ...]) -> tuple[Answer, Answer, Answer]:
    """Loss and gradients of a wider model alone in fp64, alone in bf16, and by the engine in bf16,
    with the kernels that are taken for it."""
    given = inputs(1, 0, lengths)
    model = Hybrid(layers, 64, (128, 128 if "d" in layers else 64)).to(device())
    model.bfloat16().double()  # weights that both have
    answers = []
    for dtype in (torch.float64, torch.bfloat16):
        model.to(dtype).zero_grad()
        loss = model(**given)
        loss.backward()
        answers.append(_answer(loss, model))
    model.zero_grad()
    module = parallelize(model, given, policy, over_all())
    loss = module(**given)
    loss.backward()
    module.sync_grad()
    return answers[0], answers[1], _answer(loss, module)


@in_their_own_time
def calls_without_waiting(steps: int) -> str:
    """What is wrong with calls of all ops over documents of new lengths, which are on the host,
    where in the second half of the steps torch refuses whatever makes it wait for the GPU."""
    draw, ranks, tokens = torch.Generator().manual_seed(0), dist.get_world_size(), 1024
    x = torch.randn(1, tokens, 512, generator=draw).to(device(), torch.bfloat16)
    gates = torch.randn(1, tokens, 4, generator=draw).to(device())
    filter_ = torch.randn(512, 4, generator=draw).to(x)
    leaves = [each.requires_grad_() for each in (x, gates, filter_)]
    bounds = torch.randint(1, tokens * ranks, (steps, 24), generator=draw)
    bounds[:, 0], bounds[:, 1] = 0, tokens * ranks
    cuda = device() == "cuda"
    try:
        for n, ends in enumerate(bounds.sort().values):
            if cuda and n == steps // 2:
                torch.cuda.set_sync_debug_mode("error")
            given: dict[str, Any] = {"cu_seqlens": ends, "process_group": dist.group.WORLD}
            mixed = wrap_causal_conv1d_func(x, filter_, None, "silu", **given)
            v = mixed.unflatten(-1, (4, -1))
            q, decay, beta = F.normalize(v, dim=-1), F.logsigmoid(gates), gates.sigmoid()
            y = wrap_gated_delta_rule_func(q, q, v, decay, beta, **given)
            z = wrap_gated_linear_attn_func(q, q, v[..., :64], decay, **given)
            torch.autograd.grad((y, z), leaves, (torch.ones_like(y), torch.ones_like(z)))
    except RuntimeError:
        return traceback.format_exc()
    finally:
        if cuda:
            torch.cuda.set_sync_debug_mode("default")
    return ""


def compiled(policy: Any, lengths: tuple[int, ...], hoist: bool) -> str | tuple[Answer, Answer]:
    """Loss and gradients alone and of a compiled model, or why it was refused."""
    given, model = inputs(1, 0, lengths), Hybrid("da").to(device())
    told = over_all(pas_config={"hoist": hoist})
    try:
        module = parallelize(model, given, policy, told, compile=True)
    except CaptureError as error:
        return str(error)
    return _alone_and_by(module, model, given)


def of_other_totals(
    layers: str, lengths: list[tuple[int, ...]], options: dict[str, Any]
) -> tuple[list[tuple[Answer, Answer]], int]:
    """Loss and gradients of batches of documents alone and by the engine, and the number of
    graphs."""
    model, told = Hybrid(layers).to(device()), over_all(pas_config=options)
    module = parallelize(model, inputs(1, 0, lengths[0]), "cp", told)
    answers = [_alone_and_by(module, model, inputs(1, 0, each)) for each in lengths]
    return answers, len(module._programs.plans)


def of_cases(seeds: list[int], members: tuple[int, ...] | None) -> list[str]:
    """What is wrong with random cases of both ops over real ranks, or some of them."""
    group = dist.group.WORLD if members is None else dist.new_group(list(members))
    rank, ranks = dist.get_rank(), len(members or range(dist.get_world_size()))
    if members is not None and rank not in members:
        return []
    place, wrong = (members or range(ranks)).index(rank), []
    for cases in (linear_cases, conv_cases):
        for seed in seeds:
            case, _ = cases.random_case(seed)
            parts: list[Any] = [None] * ranks
            dist.all_gather_object(parts, case.on_rank(group, place, ranks), group=group)
            try:
                cases.check(case, case.assembled(parts), case.expected())
            except AssertionError as error:
                wrong.append(str(error))
    return wrong


def refused(changed: dict[str, Any], rank: int) -> str:
    """What a call says where one rank's case is another."""
    case = linear_cases.LinearCase(tokens=8, layout="default", states="")
    case = replace(case, **changed) if dist.get_rank() == rank else case
    return refusal(case.on_rank, dist.group.WORLD, dist.get_rank(), dist.get_world_size())


def parts_of(cases: list[linear_cases.LinearCase]) -> list[list[Tensor]]:
    """This rank's part of each case, over all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return [case.on_rank(list(range(ranks)), rank, ranks) for case in cases]
