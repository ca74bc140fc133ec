"""Jobs for the tests of the chunked loss; see ``ranks.Pool``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from dtensor_jobs import mesh_of, placed, run
from loss_cases import WHOLE, LossCase, Place, parts_of, results, run_part
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from annotations import ComputeConfig, parallelize
from customized_ops.chunk_linear_cross_entropy import chunk_linear_cross_entropy, op
from customized_ops.chunk_linear_cross_entropy.chunks import gradients
from customized_ops.ring_attention.core.comm import comm_groups as groups
from customized_ops.ring_attention.op import arguments as agreement


def grid_part(case: LossCase, grid: tuple[int, int]) -> list[Tensor]:
    """This rank's part of a call over a grid of token ranks x vocabulary ranks."""
    ranks = torch.arange(dist.get_world_size()).view(grid)
    i, j = divmod(dist.get_rank(), grid[1])
    tokens = Place(i, grid[0], ranks[:, j].tolist())
    return [t.cpu() for t in run_part(case, tokens, Place(j, grid[1], ranks[i].tolist()))]


def dtensor_loss(case: LossCase, places: Sequence[str], mesh: tuple[int, ...]) -> Any:
    """A call on hidden, weight, target, bias laid out so; see ``dtensor_jobs.run``."""
    hidden, weight, target, bias = (
        placed(t, mesh_of(mesh), p) for t, p in zip(case.tensors(), places, strict=True)
    )
    return run(lambda h, w, b: case.call(h, w, target, b), [hidden, weight, bias], case.upstream())


def frozen_dtensor(case: LossCase, places: Sequence[str]) -> Any:
    """A call where weight and bias are frozen: what the backward was asked for, the shapes of the
    gradients, and the whole gradient of hidden, of the sum of losses."""
    asked = []

    def recorded(*args: Any) -> Any:
        asked.append(args[-1])
        return gradients(*args)

    hidden, weight, target, bias = (
        placed(t, mesh_of((2,)), p) for t, p in zip(case.tensors(), places, strict=True)
    )
    weight.requires_grad_(False)
    bias.requires_grad_(False)
    with patch.object(op, "gradients", recorded):
        loss, _ = replace(case, reduction="sum").call(hidden, weight, target, bias)
        loss.backward()
    shapes = [None if t.grad is None else tuple(t.grad.shape) for t in (hidden, weight, bias)]
    return asked, shapes, hidden.grad.full_tensor()


def refused_dtensors(plain: str, options: dict[str, Any]) -> tuple[str, bool]:
    """What a call on DTensors says where the one named ``plain`` is none, and whether it sent."""
    hidden, weight, target, _ = LossCase((2, 6)).tensors()
    whole = {"hidden": hidden, "weight": weight, "target": target}
    given = {n: t if n == plain else placed(t, mesh_of((2,)), "R") for n, t in whole.items()}
    with patch.object(agreement, "compares_calls", lambda group: False), CommDebugMode() as sent:
        try:
            chunk_linear_cross_entropy(**given, **options)
        except ValueError as error:
            return str(error), sent.get_total_counts() > 0
    return "no error", False


class Model(nn.Module):
    """Embedding, one layer, loss."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reduction = reduction
        self.embed = nn.Embedding(13, 8)
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 13)
        self.double()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(self.embed(tokens)))
        loss = chunk_linear_cross_entropy(
            hidden, self.head.weight, targets, bias=self.head.bias, reduction=self.reduction
        )
        return loss.square().sum() / 16 if self.reduction == "none" else loss


def samples() -> dict[str, Tensor]:
    """All tokens that count are in the first quarter, one rank's."""
    torch.manual_seed(1)
    tokens, targets = torch.randint(13, (2, 4, 7)).unbind(0)
    targets[:, 2:] = -100
    return {"tokens": tokens, "targets": targets}


def train(model: Any) -> Tensor:
    """Four steps; their losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(**samples())
        loss.backward()
        if hasattr(model, "sync_grad"):
            model.sync_grad()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def trained_alone(reduction: str) -> tuple[Model, Tensor]:
    """The model on one rank, and its losses."""
    model = Model(reduction)
    return model, train(model)


def trained_parallel(reduction: str, split: str) -> tuple[Tensor, dict[str, Tensor], str]:
    """Losses, parameters and the plan of the model cut over all ranks."""
    ranks = dist.get_world_size()
    policy = split if split in ("cp", "dp") else lambda ops, config: {op.name: split for op in ops}
    parallel = parallelize(
        Model(reduction), samples(), policy, ComputeConfig(ranks, ranks), lowered=False
    )
    losses = train(parallel)
    parameters = {name: p.detach() for name, p in parallel.named_parameters()}
    return losses, parameters, str(parallel.plan)


def counted_and_planned_bytes() -> tuple[int, int, int]:
    """Received in a step with the vocabulary cut: counted, then planned forward and backward."""
    for _, comm in groups._by_name.values():
        comm.counters.received_bytes = 0
    policy = lambda ops, config: {op.name: "v" for op in ops}  # noqa: E731
    parallel = parallelize(Model("mean"), samples(), policy, ComputeConfig(2, 2))
    parallel(**samples()).backward()
    counted = sum(comm.counters.received_bytes for _, comm in groups._by_name.values())
    rows = [row for row, _ in parallel.plan.rows if row.op == "chunk_linear_cross_entropy"]
    return counted, rows[0].forward_bytes, rows[0].backward_bytes


def compiled_groups(case: LossCase, cut: str) -> tuple[list[Tensor], list[Tensor]]:
    """A call with the world as the group of tokens or of the vocabulary: compiled, and not."""
    place = Place(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    tokens, vocab = (place, WHOLE) if cut == "tokens" else (WHOLE, place)
    given, douts, where = parts_of(case, tokens, vocab)

    def call(*tensors: Any) -> Any:
        return case.call(*tensors, **where)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    return results(case, compiled, given, douts), results(case, call, given, douts)


def disagree(change: str) -> str:
    """The ranks of a vocabulary call with something that differs; what each says."""
    rank = dist.get_rank()
    hidden, weight, target, _ = LossCase((6,), vocab=4).tensors()
    options: dict[str, Any] = {}
    match change:
        case "tokens":
            hidden, target = hidden[rank:], target[rank:]
        case "ignore_index":
            options["ignore_index"] = -1 - rank
        case "softcap":
            options["softcap"] = 1.0 + rank
        case "bias":
            options["bias"] = hidden.new_zeros(2) if rank else None
    rows = weight.chunk(2)[rank]
    try:
        chunk_linear_cross_entropy(
            hidden, rows, target, vocab_group=[0, 1], vocab_size=4, **options
        )
    except ValueError as error:
        return str(error)
    return "no error"


def all_reduced() -> tuple[Tensor, Tensor, Tensor]:
    """What this rank gave to an all-reduce, and the sum and the maximum that it got."""
    given = torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))[:, ::2]
    comm = groups.comm_by_name(groups.group_name(dist.group.WORLD))
    total, largest = torch.empty(4, 6)[:, ::2].copy_(given), given.clone()
    comm.all_reduce(total, "sum")
    return given, total, comm.all_reduce(largest, "max")
