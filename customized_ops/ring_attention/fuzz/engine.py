"""Trials of ``parallelize``: a layer with parameters around the call, over processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from annotations import ComputeConfig, parallelize

from .kinds.distributed_case import DistributedCase
from .processes import JobFailed, Pool
from .trial import TOLERANCE, Trial

SECONDS = 60.0  # after which a trial is taken to hang


class Layer(nn.Module):
    """Tokens times a parameter per channel -> the case's call -> a loss that uses every element."""

    def __init__(self, case: DistributedCase) -> None:
        super().__init__()
        given = case.arguments()
        self.case, self.compared = case, list(case.upstream())
        self.inputs = {n: x for n, x in given.items() if n not in case.PARAMETERS}
        for name, x in given.items():
            if x.is_floating_point():
                factor = torch.linspace(0.9, 1.1, x.shape[-1]).to(x)
                value = factor if name in self.inputs else x
                self.register_parameter(f"of_{name}", nn.Parameter(value))

    def forward(self, **tokens: Tensor) -> Tensor:
        """The loss of tokens that are given by the case's argument names."""
        own = {name.removeprefix("of_"): p for name, p in self.named_parameters()}
        given = own | {n: x * own[n] if n in own else x for n, x in tokens.items()}
        results = self.case.call_on_rank(given, 0, 1, None)
        named = dict(zip(self.case.result_names, results, strict=True))
        squares = [named[name].square().sum() for name in self.compared]
        return torch.stack(squares).sum()


class Engine:
    """Runs layers over processes, which start with the first layer and are kept for later ones."""

    def __init__(self) -> None:
        self._pool: Pool | None = None

    def failure(self, trial: Trial) -> str:
        """What is wrong with a layer; "" if nothing is."""
        if self._pool is None or self._pool.size != trial.ranks:
            self.close()
            self._pool = Pool(trial.ranks, seconds=SECONDS)
        try:
            return max(self._pool.run(_on_rank, trial))
        except JobFailed as error:
            last = str(error).strip().splitlines()[-1]
            return f"{last}\n{error}"

    def close(self) -> None:
        """Stop the processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def run(trials: Iterable[Trial]) -> Iterator[str]:
    """For each layer in turn, what is wrong with it; "" if nothing is."""
    with closing(Engine()) as engine:
        for trial in trials:
            yield engine.failure(trial)


def _on_rank(trial: Trial) -> str:
    """On every rank: compare the loss and all gradients under the policy with one process's."""
    alone, ranks = Layer(trial.case), dist.get_world_size()
    inputs = alone.inputs
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
