"""What a training loop calls on a parallel module besides its forward; and the optimizer steps that
are refused, because they would silently go wrong."""

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
    """The base of a parallel module: gradients summed over ranks, and whole steps."""

    compute_config: ComputeConfig
    _reducer: Reducer | None  # None on one rank
    _dummy_forward_args: Mapping[str, Any]

    @property
    def awaits_sync(self) -> bool:
        """Whether a backward has found gradients that are not added up over the ranks yet."""
        return self._reducer is not None and self._reducer.unsummed

    def sync_grad(self) -> None:
        """Add up the gradients of all ranks, in place, after the last backward of a step.

        Over the ranks of a copy this makes them complete. Over copies it sums them, as nnscaler
        does: divide the loss by ``compute_config.num_scale_units`` to get the mean. Gradients that
        no backward has added to since the last call, on any rank, stay as they are. Clear gradients
        (``zero_grad``) before the next backward: otherwise the next call sums the sums again.
        """
        if self._reducer is not None and self._reducer.due:
            self._reducer.watch(list(self.parameters()))
            self._reducer.sync()

    def no_sync(self) -> AbstractContextManager[None]:
        """Within this context, a backward communicates no gradients. Use it for all micro-batches
        of a step but the last. It is needed only with ``use_async_reducer``; without that,
        gradients move only in ``sync_grad``."""
        return nullcontext() if self._reducer is None else self._reducer.paused()

    def clip_gnorm(
        self, max_norm: float | None = None, norm_type: float = 2.0
    ) -> tuple[Tensor, list[Tensor]]:
        """Clip gradients by the norm of all of them as one vector; the name is nnscaler's. Calls
        ``sync_grad`` first. The norm is exact over ranks: each parameter enters it once, whether
        it is whole, cut or tied.

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
        """Run one step without the optimizer's: clear gradients, run forward and backward of each
        micro-batch, then sum gradients over ranks. The call is nnscaler's.

        Args:
            samples: micro-batches: forward's arguments by name, or the argument itself if forward
                has only one. The loss is what forward returns, or its first element.
            is_dummy_batch: for each sample, whether it adds nothing to the gradients: every rank
                must make the same number of calls, whether it has data or not.
            scale_fn: maps the loss to the value to differentiate, e.g. divides it by the number of
                micro-batches and copies, since gradients are summed.
        Returns:
            What forward returned for each micro-batch, unscaled and detached.

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
    """Make every torch optimizer refuse two kinds of step. An optimizer made before ``parallelize``
    has the parameters of ``original``, which no backward reaches: the loss would never change. A
    step before ``sync_grad`` would change each rank's parameters by that rank's part of the
    gradients: the ranks would drift apart."""
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

    torch's own ``get_total_norm`` does not take DTensors together with plain tensors, nor an empty
    shard for ``inf``, and it measures bf16 gradients in bf16.

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
        if part.numel():  # torch's inf norm fails on an empty tensor
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
