"""What a training loop calls on a parallel module beside its forward; and which steps of an
optimizer are refused, because they would go wrong without a word."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from ...config import ComputeConfig
from ..strategies.placements import cut_axes
from .gradient_sync import Reducer, local


class TrainingModule(torch.nn.Module):
    """Gradients over ranks, and whole steps."""

    compute_config: ComputeConfig
    _reducer: Reducer | None  # None on one rank
    _dummy_forward_args: Mapping[str, Any]

    @property
    def awaits_sync(self) -> bool:
        """Whether a backward has found gradients that are not added up over the ranks yet."""
        return self._reducer is not None and self._reducer.unsummed

    def sync_grad(self) -> None:
        """Add up the gradients of all ranks, in place, after the last backward of a step.

        Over the ranks of a copy this makes them whole. Over copies it adds them, as nnscaler does:
        divide the loss by ``compute_config.num_scale_units`` for their mean. Gradients that no
        backward has added to since the last call, on any rank, stay as they are. Clear gradients
        before the next backward (``zero_grad``): what it adds to a sum is added up with it.
        """
        if self._reducer is not None and self._reducer.due:
            self._reducer.watch(list(self.parameters()))
            self._reducer.sync()

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards within move no gradients: for all micro-batches of a step but the last. Needed
        with ``use_async_reducer`` only; without it gradients move in ``sync_grad`` alone."""
        return nullcontext() if self._reducer is None else self._reducer.paused()

    def clip_gnorm(
        self, max_norm: float | None = None, norm_type: float = 2.0
    ) -> tuple[Tensor, list[Tensor]]:
        """The norm of all gradients as one vector, and clipping by it; nnscaler's name. Calls
        ``sync_grad`` first. Exact over ranks: a parameter counts once, whole, cut or tied.

        Args:
            max_norm: gradients are scaled so that the norm is at most this; None or 0 measures.
            norm_type: p of the p-norm, or ``inf``.
        Returns:
            The norm before clipping, a scalar that is the same on every rank, and the gradients.

        Raises:
            ValueError: a negative ``max_norm``, or ``norm_type`` not above 0.
        """
        if (max_norm is not None and max_norm < 0) or not norm_type > 0:
            raise ValueError(
                "clip_gnorm: max_norm must not be negative and norm_type must be above 0, got "
                f"max_norm={max_norm}, norm_type={norm_type}"
            )
        self.sync_grad()
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        norm = total_norm(grads, norm_type)
        if max_norm:
            torch.nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm)
        return norm, grads

    def train_step(
        self,
        samples: Sequence[Any],
        is_dummy_batch: Sequence[bool] | None = None,
        scale_fn: Callable[[Tensor], Tensor] | None = None,
    ) -> list[Any]:
        """One step but for the optimizer's: gradients cleared, then forward and backward of each
        micro-batch, then gradients added up over ranks. nnscaler's call.

        Args:
            samples: micro-batches: forward's arguments by name, or the argument itself where
                forward has one. The loss is what forward returns, or the first of it.
            is_dummy_batch: for each, whether it adds nothing to the gradients: every rank must make
                as many calls, whether it has data or not.
            scale_fn: from the loss to what is differentiated, e.g. divided by the number of
                micro-batches and copies, since gradients are added up.
        Returns:
            What forward returned for each micro-batch, unscaled, without its graph.

        Raises:
            RuntimeError: the module was made without ``ComputeConfig(use_end2end=True)``.
            ValueError: no samples, counts that differ, or a loss that is no scalar.
        """
        self._check_end2end("train_step")
        dummies = [False] * len(samples) if is_dummy_batch is None else is_dummy_batch
        if not samples or len(dummies) != len(samples):
            raise ValueError(
                "train_step: needs at least one sample and as many entries of is_dummy_batch, got "
                f"{len(samples)} and {len(dummies)}"
            )
        self.zero_grad()
        results = []
        for n, (sample, dummy) in enumerate(zip(samples, dummies, strict=True), 1):
            with nullcontext() if n == len(samples) else self.no_sync():
                result = self._call(sample)
                loss = _loss(result)
                if not dummy:
                    (scale_fn(loss) if scale_fn else loss).backward()
            results.append(pytree.tree_map_only(Tensor, Tensor.detach, result))
        self.sync_grad()
        return results

    def infer_step(self, samples: Sequence[Any]) -> list[Any]:
        """What forward returns for each micro-batch, without gradients; nnscaler's call. Switch to
        ``eval()`` yourself where the model needs it.

        Raises:
            RuntimeError: the module was made without ``ComputeConfig(use_end2end=True)``.
        """
        self._check_end2end("infer_step")
        with torch.no_grad():
            return [self._call(sample) for sample in samples]

    def _check_end2end(self, what: str) -> None:
        if not self.compute_config.use_end2end:
            raise RuntimeError(f"{what}() needs ComputeConfig(use_end2end=True)")

    def _call(self, sample: Any) -> Any:
        if len(self._dummy_forward_args) == 1:
            return self(sample)
        if not isinstance(sample, Mapping):
            raise ValueError(
                f"a sample must map forward's arguments ({', '.join(self._dummy_forward_args)}) to "
                f"values, got {type(sample).__name__}"
            )
        return self(**sample)


_guarded: WeakKeyDictionary[TrainingModule, list[ReferenceType[Parameter]]] = WeakKeyDictionary()


def refuse_wrong_steps(module: TrainingModule, original: torch.nn.Module) -> None:
    """Have every torch optimizer refuse two steps. One that was made before ``parallelize`` has the
    parameters of ``original``, which no backward reaches: the loss stays as it is. One that steps
    before ``sync_grad`` changes the parameters of each rank by that rank's part of the gradients:
    the ranks drift apart."""
    _guarded[module] = [ref(parameter) for parameter in original.parameters()]
    _register_hook()


@functools.cache
def _register_hook() -> None:
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


def _loss(result: Any) -> Tensor:
    loss = result[0] if isinstance(result, tuple | list) else result
    if isinstance(loss, Tensor) and not loss.ndim:
        return loss
    shown = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
    raise ValueError(f"train_step: forward must return a scalar loss first, got {shown}")


@torch.no_grad()
def total_norm(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of all gradients as one vector, the same on every rank.

    torch's own ``get_total_norm`` takes no DTensors beside plain tensors, no empty part for
    ``inf``, and measures bf16 gradients in bf16.

    Args:
        grads: plain tensors, which are the same on every rank, and DTensors.
        norm_type: p of the p-norm, above 0; ``inf`` for the largest absolute value.
    Returns:
        A scalar, fp32 (fp64 where a gradient is).
    """
    if not grads:
        return torch.zeros(())
    largest = math.isinf(norm_type)
    dtype = torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32
    # Ranks exchange one number for all gradients that are cut over the same axes of a mesh.
    groups: dict[Any, list[Tensor]] = {}
    for grad in grads:
        part, axes = local(grad), cut_axes(grad)
        norm = part.new_zeros((), dtype=dtype)
        if part.numel():  # torch has no largest element of nothing
            norm = torch.linalg.vector_norm(part, norm_type, dtype=dtype)
        key = (grad.device_mesh, axes) if isinstance(grad, DTensor) and axes else (None, ())
        groups.setdefault(key, []).append(norm.double())
    powers = []
    for (mesh, axes), norms in groups.items():
        power = torch.stack(norms).max() if largest else (torch.stack(norms) ** norm_type).sum()
        if mesh is not None:
            partial = Partial("max" if largest else "sum")
            placements = [partial if axis in axes else Replicate() for axis in range(mesh.ndim)]
            power = DTensor.from_local(power, mesh, placements, run_check=False).full_tensor()
        powers.append(power)
    total = torch.stack(powers)
    return (total.max() if largest else total.sum() ** (1 / norm_type)).to(dtype)
