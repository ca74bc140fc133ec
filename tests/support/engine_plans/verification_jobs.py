"""Jobs for what ``verify`` finds in models of one process and of several; see ``ranks.Pool``."""

from __future__ import annotations

from typing import Any
from unittest import mock

import engine_jobs
import recurrent_jobs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from planning_jobs import SLOW, config
from steps import over_all, refusal
from torch import Tensor, nn

from annotations import parallelize, register_op
from annotations.engines.torch.module import parallel_module as engine_module


class Wrong(nn.Module):
    """Its bias is not what it was by the second call."""

    def __init__(self) -> None:
        super().__init__()
        self.good, self.bad = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.bad(self.good(x)).square().mean()


def verified(wrong: bool, smaller: bool = False) -> str:
    """What ``verify`` says of a module; ``wrong`` loses half of a gradient on the way. On the
    example, or on a ``smaller`` one."""
    torch.manual_seed(0)
    given = {"x": torch.randn(4, 6, 4, dtype=torch.float64)}
    verify: Any = {"x": given["x"][:2]} if smaller else True
    model = Wrong()
    sync = engine_module.ParallelModule.sync_grad

    def losing(self: Any) -> None:
        sync(self)
        self.bad.weight.grad.mul_(0.5)

    told, used = config(2, (2,), rates=SLOW), losing if wrong else sync
    with mock.patch.object(engine_module.ParallelModule, "sync_grad", used):
        try:
            parallel = parallelize(model, given, "auto", told, verify=verify, engine="torch")
        except ValueError as error:
            return f"{type(error).__name__}: {error}"
    assert all(p.grad is None for p in parallel.parameters())
    parallel(**given)
    return "the same"


class Scaled(nn.Module):
    """What is multiplied by a constant of ``factor``."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = torch.tensor([1.0, factor], dtype=torch.float64)  # neither of the two kinds
        self.linear = nn.Linear(2, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.scale).square().mean()


def constants(policy: Any, differ: bool) -> tuple[float, float] | str:
    """Losses in both modes of a module with a constant, or what is said of it."""
    x = torch.ones(4, 6, 2, dtype=torch.float64)
    try:
        module = Scaled(2.0 + dist.get_rank() * differ)
        model = parallelize(module, {"x": x}, policy, config(2, (2,)), lowered=False)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return model(x).item(), model.eval()(x).item()


class Chosen(nn.Module):
    """A model of whole numbers: which tokens come in, and with the loss which would come next."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(16, 8).double(), nn.Linear(8, 16).double()

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.embed(tokens))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss, logits.argmax(-1)


def verified_integers(policy: Any) -> bool:
    """Whether a module of whole numbers is verified, and leaves no gradient behind."""
    given = {"tokens": torch.arange(12).view(2, 6), "targets": torch.arange(12).view(2, 6) % 5}
    told = config(2, (2,), rates=SLOW)
    model = parallelize(Chosen(), given, policy, told, verify=True, lowered=False)
    return all(p.grad is None for p in model.parameters())


@register_op("b l d -> b l d", name="seqshard_tests::running_sum", differentiable=("x",))
def running_sum(x: Tensor) -> Tensor:
    """Annotated wrongly: a rank's part of l does not begin at 0."""
    return x.cumsum(1)


class RunningSum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(running_sum(self.first(x)).relu()).square().mean()


def verified_annotation(policy: Any) -> str:
    """What ``verify`` says of a module with an op that is annotated wrongly."""
    torch.manual_seed(3)
    given = {"x": torch.randn(4, 6, 4, dtype=torch.float64)}
    options = {"verify": True, "lowered": False}
    return refusal(parallelize, RunningSum(), given, policy, over_all(), **options)


def verified_ops(op: str) -> str:
    """What ``verify`` says where all ops are right, and gradients are lost after them: of a Llama
    with this attention, or of attention and a loss."""
    model: nn.Module
    if op == "loss":
        model, given = engine_jobs.Losses("sum"), engine_jobs.loss_inputs()
    elif op == "recurrent":  # which saves other states where it is cut
        model, given = recurrent_jobs.Hybrid("d"), recurrent_jobs.inputs(1, 0, (9, 15))
    else:
        model, given = engine_jobs.tiny_llama(op), engine_jobs.sample(op, 1, 30)
    told = over_all(pas_config={"hoist": True})
    with mock.patch.object(engine_module.ParallelModule, "sync_grad", lambda self: None):
        return refusal(parallelize, model, given, "cp", told, verify=True, lowered=False)
