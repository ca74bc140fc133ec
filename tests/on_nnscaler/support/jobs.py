"""Training with nnscaler on the ranks of a ``ranks.Pool``, and the same training alone.

    jobs.trained(pool, Training(models.tiny, models.batch, policy="tp", plan=2))

One pool serves many jobs: a job has a folder and names of its own for the code that nnscaler
generates, and leaves behind nothing but nnscaler's process groups.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import nnscaler
import torch
import torch.distributed as dist
from nnscaler.flags import RuntimeFlag
from nnscaler.parallel import ParallelModule
from torch import Tensor, nn

from annotations import parallelize

from .cpu import on_cpu

if TYPE_CHECKING:  # programs that import this have no pool
    from ranks import Pool

LEARNING_RATE = 1e-2


@dataclass(frozen=True)
class Training:
    """What to train and how. All functions are of a module, so that processes can import them.

    ``batch(seed)`` gives keyword arguments of the model, which returns the loss; with
    ``end2end`` one argument. ``config`` are further fields of nnscaler's ComputeConfig.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Any]]
    policy: str | Callable[..., Any] = "tp"
    plan: int = 2
    steps: int = 3
    micro_batches: int = 1
    end2end: bool = False
    config: dict[str, Any] = field(default_factory=dict)

    def compute_config(self, ranks: int, device: torch.device) -> nnscaler.ComputeConfig:
        further = {"trace_strategy": device.type, **self.config}
        return nnscaler.ComputeConfig(self.plan, ranks, use_end2end=self.end2end, **further)

    def batches(self, step: int, unit: int) -> list[dict[str, Any]]:
        """The micro batches of one step of one scale unit, as different as can be."""
        first = 1 + (100 * step + unit) * self.micro_batches
        return [self.batch(first + n) for n in range(self.micro_batches)]


@dataclass
class Rank:
    """What `train` replies: this rank's losses, its parts of gradients and parameters, its code,
    and on rank 0 the plan."""

    losses: list[list[float]]
    gradients: list[dict[str, Any]]
    parameters: dict[str, Any]
    code: str
    plan: str | None


@dataclass
class Trained:
    """On the host: per step the loss of each micro batch, and by parameter's name what it was."""

    losses: list[list[float]]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]


@contextmanager
def world() -> Iterator[torch.device]:
    """What torchrun would have set for this rank, and the CPU where there is no CUDA."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    environment = {
        "TORCHELASTIC_RUN_ID": "tests",  # by which nnscaler sees that it is not alone
        **{"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0"},
        **{"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size},
    }
    cuda = dist.get_backend() == "nccl"
    with mock.patch.dict(os.environ, environment), on_cpu(not cuda):
        try:
            yield torch.device("cuda" if cuda else "cpu", dist.get_rank() if cuda else None)
        finally:
            # build_optimizer leaves gradients' reduction off for what comes after.
            RuntimeFlag.skip_reducer = RuntimeFlag.skip_zero_grad = False


@contextmanager
def generated() -> Iterator[dict[str, str]]:
    """Where parallelize may write, as its keyword arguments: the same on all ranks, used once."""
    with ExitStack() as stack:
        shared = [""]
        if dist.get_rank() == 0:
            shared = [stack.enter_context(tempfile.TemporaryDirectory(prefix="gen_"))]
        dist.broadcast_object_list(shared)
        name, folder = Path(shared[0]).name, str(Path(shared[0]).resolve())
        try:
            yield {"gen_savedir": folder, "instance_name": name, "reuse": "override"}
            dist.barrier()  # before rank 0 removes the folder
        finally:
            sys.path[:] = [path for path in sys.path if path != folder]
            for module in [m for m in sys.modules if name in m.split(".")]:
                del sys.modules[module]


def moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {key: moved(v, device) for key, v in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


def train(training: Training, *others: Training) -> Rank:
    """The job: parallelize and train.

    ``others`` go on, each from the merged state of the one before, with another policy or config.
    """
    losses, gradients, states, plan = [], [], None, None
    with world() as device:
        for part in (training, *others):
            with generated() as where:
                config = part.compute_config(dist.get_world_size(), device)
                model = parallelize(
                    part.model(), part.batch(0), part.policy, config, engine="nnscaler", **where
                )
                [file] = Path(where["gen_savedir"]).rglob(f"gencode{dist.get_rank()}.py")
                code, plan = file.read_text(), model.plan
            optimizer = nnscaler.build_optimizer(model, torch.optim.Adam, lr=LEARNING_RATE)
            if states is not None:
                nnscaler.load_merged_state_dict(model, states[0], optimizer, states[1])
            for _ in range(part.steps):
                batches = part.batches(len(losses), dist.get_rank() // part.plan)
                losses.append(_forward_backward(model, moved(batches, device), part.end2end))
                optimizer.sync_shard_grad()
                gradients.append(_as_state(model, {n: p.grad for n, p in model.named_parameters()}))
                optimizer.step()
                optimizer.zero_grad()
            states = _merged_states(model, optimizer) if others else None
    return Rank(losses, gradients, _as_state(model, {}), code, plan)


def _merged_states(model: ParallelModule, optimizer: Any) -> tuple[dict, dict]:
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, (model.state_dict(), optimizer.state_dict()))
    return nnscaler.merge_state_dicts(*map(list, zip(*every, strict=True)))


def generate(training: Training, folder: Path, ranks: int) -> list[str]:
    """Only plan and generate, in this process, for any number of ranks; the code of each."""
    with on_cpu():
        config = training.compute_config(ranks, torch.device("cpu"))
        parallelize(
            training.model(),
            training.batch(0),
            training.policy,
            config,
            engine="nnscaler",
            load_module=False,
            gen_savedir=folder,
            reuse="override",
        )
    sys.path.remove(str(folder.resolve()))
    return [next(folder.rglob(f"gencode{rank}.py")).read_text() for rank in range(ranks)]


def _forward_backward(
    model: ParallelModule, batches: list[dict[str, Any]], end2end: bool
) -> list[float]:
    if end2end:
        losses = model.train_step([next(iter(batch.values())) for batch in batches])
        return [loss.item() for loss in losses]
    losses = []
    for n, batch in enumerate(batches):
        with nnscaler.sync_grad_when(n == len(batches) - 1):
            loss = model(**batch)
            loss.backward()
        losses.append(loss.item())
    return losses


def _as_state(model: ParallelModule, instead: dict[str, Tensor]) -> dict[str, Any]:
    """The state dict, with what nnscaler needs to merge it, of other values where given.

    Gradients are cut as their parameters are, so nnscaler can merge them all the same.
    """
    state = {**model.state_dict(), **instead}
    return {n: v.detach().cpu().clone() if isinstance(v, Tensor) else v for n, v in state.items()}


def merged(ranks: list[Rank], training: Training) -> list[Trained]:
    """All ranks' replies of `train`, merged: one result a scale unit, of which losses differ."""
    steps = zip(*(rank.gradients for rank in ranks), strict=True)
    gradients = [nnscaler.merge_state_dicts(list(parts))[0] for parts in steps]
    parameters = nnscaler.merge_state_dicts([rank.parameters for rank in ranks])[0]
    return [Trained(rank.losses, gradients, parameters) for rank in ranks[:: training.plan]]


def train_alone(training: Training, units: int) -> list[Trained]:
    """The oracle: plain torch. nnscaler sums gradients over micro batches and scale units."""
    model = training.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    losses: list[list[list[float]]] = [[] for _ in range(units)]
    gradients = []
    for step in range(training.steps):
        for unit in range(units):
            losses[unit].append([])
            for batch in training.batches(step, unit):
                loss = model(**batch)
                loss.backward()
                losses[unit][-1].append(loss.item())
        grads = {n: p.grad for n, p in model.named_parameters()}
        gradients.append({n: grad.clone() for n, grad in grads.items() if grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    return [Trained(losses[unit], gradients, parameters) for unit in range(units)]


def trained(
    pool: Pool, training: Training, *then: Training, tolerance: float = 1e-10
) -> list[Rank]:
    """The ranks of a pool train, and go on with other plans; all equals plain torch."""
    ranks = pool.run(train, training, *then)
    assert_equals_alone(ranks, training, tolerance)
    return ranks


def assert_equals_alone(ranks: list[Rank], training: Training, tolerance: float = 1e-10) -> None:
    """Losses, gradients and parameters of all steps equal those of plain torch."""
    training = replace(training, steps=len(ranks[0].losses))
    alone = train_alone(training, units=len(ranks) // training.plan)
    for got, want in zip(merged(ranks, training), alone, strict=True):
        assert_equal(got, want, tolerance)


def assert_equal(got: Trained, want: Trained, tolerance: float) -> None:
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    numbers = partial(torch.tensor, dtype=torch.float64)
    close(numbers(got.losses), numbers(want.losses), msg=lambda m: f"losses: {m}")
    for step, gradients in enumerate(want.gradients):
        for name, gradient in gradients.items():
            close(got.gradients[step][name], gradient, msg=lambda m, n=name: f"d {n}: {m}")
    for name, parameter in want.parameters.items():
        close(got.parameters[name], parameter, msg=lambda m, n=name: f"{n}: {m}")
