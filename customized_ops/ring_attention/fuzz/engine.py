"""Trials of ``parallelize``: a layer of projections around the call, over processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from annotations import ComputeConfig, parallelize

from .attention_case import Case
from .processes import JobFailed, Pool
from .trial import TOLERANCE, Trial

WIDTH = 6
SECONDS = 60.0  # of one trial, after which it counts as hanging


class Layer(nn.Module):
    """Tokens -> q, k, v -> the case's call -> tokens -> a loss that knows every element."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        (h, g), (d, e) = case.heads, case.dims
        self.case = case
        self.project = nn.ModuleList(nn.Linear(WIDTH, n * m) for n, m in ((h, d), (g, d), (g, e)))
        self.out = nn.Linear(h * e, WIDTH)
        self.sink = nn.Parameter(torch.sin(torch.arange(1.0, 1 + h))) if case.sink else None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x, y: [b, l, WIDTH] and [b, m, WIDTH], of queries and of keys; without b if packed."""
        (h, g), tokens = self.case.heads, (x, y, y)
        heads = zip(self.project, tokens, (h, g, g), strict=True)
        q, k, v = (p(t).unflatten(-1, (n, -1)) for p, t, n in heads)
        out, _ = self.case.call(q, k, v, self.sink)
        return self.out(out.flatten(-2)).square().sum()


def run(trials: Sequence[Trial]) -> Iterator[str]:
    """Of each trial in turn, what is wrong with it; "" if nothing is. All have as many ranks."""
    pool = Pool(trials[0].ranks, seconds=SECONDS)
    try:
        for trial in trials:
            yield _failure(pool, trial)
    finally:
        pool.close()


def _failure(pool: Pool, trial: Trial) -> str:
    try:
        return max(pool.run(_on_rank, trial))
    except JobFailed as error:
        last = str(error).strip().splitlines()[-1]
        return f"{last}\n{error}"


def _on_rank(trial: Trial) -> str:
    """On every rank: the loss and all gradients under the policy, against this process alone."""
    case = trial.case
    torch.manual_seed(case.seed)
    alone = Layer(case).double()
    lead = () if case.packed else (case.batch,)
    inputs = {
        "x": torch.randn(*lead, case.length, WIDTH, dtype=torch.float64),
        "y": torch.randn(*lead, case.k_length, WIDTH, dtype=torch.float64),
    }
    ranks = dist.get_world_size()
    parallel = parallelize(alone, inputs, trial.policy, ComputeConfig(ranks, ranks))
    losses = []
    for model in (parallel, alone):
        loss = model(**inputs)
        loss.backward()
        losses.append(loss.detach())
    parallel.sync_grad()
    results = [("loss", *losses)]
    for (name, p), (_, q) in zip(
        parallel.named_parameters(), alone.named_parameters(), strict=True
    ):
        assert p.grad is not None and q.grad is not None
        whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        results.append((name, whole, q.grad))
    return "".join(_difference(*result) for result in results)


def _difference(name: str, got: Tensor, want: Tensor) -> str:
    scale = max(1.0, want.abs().amax().item()) if want.numel() else 1.0
    error = (got - want).abs().amax().item() / scale if want.numel() else 0.0
    return "" if error <= TOLERANCE else f"{name}: error {error:.3e}, allowed {TOLERANCE:.0e}\n"
