"""Small models for the engine tests, and jobs that run them; see ``ranks.Pool``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_groups import device
from shared.llama import Llama, LlamaConfig
from steps import gradients, over_all, received_bytes, step
from torch import Tensor, nn

from annotations import ComputeConfig, parallelize
from customized_ops.ring_attention import wrap_ring_attn_func


def tiny_llama(op: str, layers: int = 1) -> Llama:
    torch.manual_seed(0)
    config = LlamaConfig(dim=32, layers=layers, heads=4, kv_heads=2, hidden=48, vocab=64, op=op)
    return Llama(config).double()


def sample(op: str, batch: int, length: int, seed: int = 1) -> dict[str, Tensor]:
    """Inputs of which only the first quarter's targets count: those of the first shard."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(64, (batch, length), generator=g)
    targets = torch.randint(64, (batch, length), generator=g)
    targets[:, length // 4 :] = -100
    positions = torch.arange(length).repeat(batch, 1)
    given = {"tokens": tokens, "targets": targets, "position_ids": positions}
    if op == "varlen":
        cuts = [0, length // 5, length // 5, length // 2 + 3, length, length]
        given["cu_seqlens"] = torch.tensor(cuts, dtype=torch.int32)
    return given


def alone(op: str, copies: int, batch: int, length: int, layers: int) -> tuple[Llama, list[float]]:
    """One process: a model with the mean gradients of all copies' batches, and each one's loss."""
    model, losses = tiny_llama(op, layers), []
    for copy in range(copies):
        loss = model(**sample(op, batch, length, seed=1 + copy))
        (loss / copies).backward()
        losses.append(loss.item())
    return model, losses


def loss_and_gradients(
    op: str, policy: Any, plan: int, batch: int, length: int, layers: int, lowered: bool = True
) -> tuple[float, dict[str, Tensor], str]:
    """One step of a copy on its own batch: loss, gradients after sync, the plan's text."""
    model = tiny_llama(op, layers).to(device())

    def inputs(seed: int) -> dict[str, Tensor]:
        return {name: t.to(device()) for name, t in sample(op, batch, length, seed).items()}

    config = ComputeConfig(plan, dist.get_world_size())
    parallel = parallelize(model, inputs(1), policy, config, lowered=lowered)
    loss, _ = step(parallel, inputs(1 + dist.get_rank() // plan))
    parallel.sync_grad()  # nothing has run since: must not add again
    model.load_state_dict(parallel.state_dict())
    parallel.load_state_dict(model.state_dict())
    return loss, gradients(parallel), str(parallel.plan)


def heads_then_sequence(ops: Any, config: ComputeConfig) -> dict[str, str]:
    """A policy: the first attention on heads (Ulysses), the others on the sequence."""
    attention = [op for op in ops if op.communicates]
    assert attention[0].module == "blocks.0.attention"
    return {op.name: "l" if n else "g" for n, op in enumerate(attention)}


def counted_and_planned_bytes() -> tuple[int, int, int, int, str]:
    """Received bytes as counted by the op's comm and as the plan says, forward, then backward; and
    the plan's text."""
    given = sample("ring", 1, 33)
    parallel = parallelize(tiny_llama("ring"), given, "cp", over_all(), lowered=False)
    before = received_bytes()
    loss = parallel(**given)
    between = received_bytes()
    loss.backward()
    row = next(row for row, _ in parallel.plan.rows if row.op == "wrap_ring_attn_func")
    counted = between - before, received_bytes() - between
    return *counted, row.forward_bytes, row.backward_bytes, str(parallel.plan)


class Losses(nn.Module):
    """Attention, then cross entropy in one of the forms that models use."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.project = form, nn.Linear(8, 12).double()

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        y = wrap_ring_attn_func(x, x, x).flatten(2)
        logits = self.project(y)
        match self.form:
            case "classes second":
                return F.cross_entropy(logits.transpose(1, 2), targets)
            case "sum":
                return F.cross_entropy(logits.view(-1, 12), targets.view(-1), reduction="sum")
            case "smoothed":
                return F.cross_entropy(
                    logits.view(-1, 12), targets.view(-1), label_smoothing=0.1, ignore_index=3
                )
            case "weighted":
                weight = torch.arange(1.0, 13.0, dtype=torch.float64)
                return F.cross_entropy(logits.view(-1, 12), targets.view(-1), weight=weight)
            case "ignore 5":
                return F.cross_entropy(logits.view(-1, 12), targets.view(-1), ignore_index=5)
        raise AssertionError(self.form)


def loss_inputs() -> dict[str, Tensor]:
    # As many tokens as classes, so that taking the one dim for the other would not be noticed.
    torch.manual_seed(1)
    x = torch.randn(2, 12, 2, 4, dtype=torch.float64)
    return {"x": x, "targets": torch.randint(12, (2, 12))}


def loss_form(form: str) -> tuple[float, Tensor, Tensor]:
    given = loss_inputs()
    parallel = parallelize(Losses(form), given, "cp", ComputeConfig(2, 2), lowered=False)
    given["x"].requires_grad_()
    loss, grads = step(parallel, given)
    return loss, grads["project.weight"], given["x"].grad


class Plain(nn.Module):
    """No attention; or something that cannot be cut."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.linear = what, nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "dropout":
            x = F.dropout(x, 0.1, self.training)
        if self.what == "noise":
            x = x + torch.randn_like(x)
        if self.what == "buffer":
            self.seen.add_(1)
        y = self.linear(x).view(*x.shape[:2], 2, 4)
        if self.what == "value" and y.sum().item() > 1:
            y = 2 * y
        return y.sum() if self.what == "no attention" else wrap_ring_attn_func(y, y, y).sum()


def eval_mode_and_dropout() -> tuple[float, float]:
    """Dropout drops in training only; the plan follows the mode."""
    torch.manual_seed(0)
    module = Plain("dropout").eval()
    given = {"x": torch.randn(2, 8, 8)}
    parallel = parallelize(module, given, "cp", ComputeConfig(2, 2))
    result = parallel(**given).item()
    parallel.train()
    assert parallel(**given).item() != parallel(**given).item()
    parallel.eval()
    assert parallel(**given).item() == result
    return result, module(**given).item()


def seeds_may_differ() -> list[Tensor]:
    """Ranks that initialise differently start from rank 0's weights."""
    torch.manual_seed(dist.get_rank())
    module = Plain("fine")
    parallel = parallelize(module, {"x": torch.zeros(2, 8, 8)}, "cp", ComputeConfig(2, 2))
    return [p.detach().clone() for p in parallel.parameters()]


class Branches(nn.Module):
    """Which parameters a copy uses depends on its input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.unused = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.9)

    def forward(self, x: Tensor, second: bool) -> Tensor:
        return self.drop(self.c((self.b if second else self.a)(x))).sum()


def copies_use_different_parameters() -> dict[str, Tensor | None]:
    """Gradients after sync of two whole copies, each with a branch of its own."""
    module = Branches()
    module.drop.eval()
    given = {"x": torch.ones(2, 4), "second": False}
    parallel = parallelize(module, given, "cp", ComputeConfig(1, 2))
    assert parallel.training
    parallel(torch.ones(2, 4), second=dist.get_rank() == 1).backward()
    assert not parallel.drop.training
    parallel.sync_grad()
    return {name: p.grad for name, p in parallel.named_parameters()}
