"""Steps of optimizers that would go wrong without a word.

An optimizer that was made before ``parallelize`` has the original's parameters, which no backward
reaches: the loss stays as it is. One that steps before ``sync_grad`` changes the parameters of each
rank by that rank's part of the gradients: the ranks drift apart. A hook before every step of every
torch optimizer refuses both.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .training import TrainingModule

_guarded: WeakKeyDictionary[TrainingModule, list[ReferenceType[Parameter]]] = WeakKeyDictionary()


def guard(module: TrainingModule, original: torch.nn.Module) -> None:
    """Refuse steps that are wrong for a parallelized module, made of ``original``."""
    _guarded[module] = [ref(parameter) for parameter in original.parameters()]
    _register()


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for module, originals in list(_guarded.items()):
        parameters = list(module.parameters())
        if module.awaits_sync and any(id(p) in held for p in parameters):
            raise RuntimeError(
                "optimizer.step() before sync_grad(): each rank has its own part of the gradients, "
                "so ranks would go on with different parameters; call module.sync_grad() after the "
                "last backward of a step"
            )
        stale = [p for each in originals if (p := each()) is not None and id(p) in held]
        reached = any(p.grad is not None for p in parameters)
        if stale and reached and all(p.grad is None for p in stale):
            raise RuntimeError(
                "the optimizer has the parameters of the module that was given to parallelize, "
                "which no backward reaches; make it after parallelize, over the parameters() of "
                "the module that it returned"
            )
