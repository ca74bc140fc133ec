"""Sums gradients over ranks in buckets, after the backward or while it still runs.

    .grad of each parameter --start--> one flat tensor a bucket, all-reduced --finish--> .grad

A backward that is one graph (:mod:`..run.lowered`) reports each gradient before it is in .grad, so
a bucket can start with the value that .grad is going to have. Autograd still adds the gradient to
.grad later; ``finish`` then overwrites .grad with the sum.

The gradient of a whole parameter is summed over all ranks. That of a parameter that the plan cuts
is summed over the copies of the model. Copies may use different parameters, so each bucket also
carries flags for which of its parameters have a gradient. If any rank has one, every rank gets the
sum. All ranks start the same buckets in the same order.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.utils.weak import TensorWeakRef

from ..strategies.placements import cut_axes

DEFAULT_BUCKET_MB = 25.0


@dataclass(eq=False)
class Bucket:
    """Gradients that travel together.

    Attributes:
        parameters: all of one dtype and group; together at most the cap in bytes, unless only one.
        group: the ranks whose gradients are summed; None means all ranks.
        missing: parameters that the backward has not reached yet.
        early: gradients that are not in ``.grad`` yet.
    """

    parameters: Sequence[Parameter]
    group: dist.ProcessGroup | None
    missing: set[Parameter] = field(default_factory=set)
    early: dict[Parameter, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.missing.update(self.parameters)

    def start(self) -> None:
        """Start the all-reduce of this rank's gradients, with their present values."""
        gradients = [self._gradient(p) for p in self.parameters]
        self.early.clear()
        used = [g is not None for g in gradients]
        parts = [
            torch.zeros_like(local(p)).reshape(-1) if g is None else g.reshape(-1)
            for p, g in zip(self.parameters, gradients, strict=True)
        ]
        flags = parts[0].new_ones(len(used))
        if not all(used):  # a copy to the GPU waits for it
            flags.copy_(torch.tensor(used))
        self._flat = torch.cat([*parts, flags])
        self._work: Any = dist.all_reduce(self._flat, group=self.group, async_op=True)

    def _gradient(self, parameter: Parameter) -> Tensor | None:
        """What ``.grad`` is, or is going to be."""
        early, grad = self.early.get(parameter), parameter.grad
        if grad is None or early is None:
            return early if grad is None else local(grad)
        return local(grad) + early

    def finish(self) -> None:
        """Wait for the sums, put them into ``.grad``, and reset for the next backward."""
        self._work.wait()
        sizes = [local(p).numel() for p in self.parameters]
        *sums, flags = self._flat.split([*sizes, len(sizes)])
        if any(p.grad is None for p in self.parameters):
            for parameter, ranks in zip(self.parameters, flags.tolist(), strict=True):
                if ranks and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        for parameter, total in zip(self.parameters, sums, strict=True):
            if parameter.grad is not None:
                grad = local(parameter.grad)
                grad.copy_(total.view(grad.shape))
        del self._flat, self._work
        self.missing.update(self.parameters)


class Reducer:
    """The gradients of a module, in buckets.

    Args:
        cap_bytes: maximum size of a bucket.
        copies: the ranks that hold the same part of each copy; None if there is one copy.
        overlap: start each bucket during the backward, as soon as its last gradient is there.
    """

    def __init__(
        self, cap_bytes: float, copies: dist.ProcessGroup | None, *, overlap: bool
    ) -> None:
        self._cap_bytes, self._copies, self._overlap = cap_bytes, copies, overlap
        self._watched: list[Parameter] = []
        self._hooks: list[Any] = []
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[Parameter, Bucket] = {}
        self._reported: dict[Parameter, tuple[int, int]] = {}
        self._started = self._forwards = 0  # buckets started; forwards since the last gradient
        self._paused = self._ran = False  # in no_sync; a forward has run since the last sync
        self._new: set[Parameter] = set()  # parameters with a gradient from a backward since then
        # The gradient of each parameter after the last sync, and its tensor version then.
        self._summed: dict[Parameter, tuple[TensorWeakRef, int]] = {}
        self._warned = False

    @property
    def due(self) -> bool:
        """Whether there may be gradients to add up. A forward is enough: another copy may have run
        a backward where this one ran none."""
        return self._ran or bool(self._new)

    @property
    def unsummed(self) -> bool:
        """Whether a backward has added to a gradient since the last sync."""
        return bool(self._new)

    def forward(self, parameters: Sequence[Parameter]) -> None:
        """Register a forward whose backward may compute gradients of these parameters."""
        self.watch(parameters)
        self._forwards += 1
        self._ran = True

    def watch(self, parameters: Sequence[Parameter]) -> None:
        """Watch these parameters; every rank watches the same ones."""
        parameters = [p for p in parameters if p.requires_grad]
        same = list(map(id, parameters)) == list(map(id, self._watched))
        # A parameter may have changed its dtype since; a bucket has only one dtype.
        recast = any(len({p.dtype for p in bucket.parameters}) > 1 for bucket in self._buckets)
        if same and not recast:
            return
        for hook in self._hooks:
            hook.remove()
        self._watched = parameters
        # The backward reaches the last parameters first.
        self._buckets = list(buckets(parameters[::-1], self._copies, self._cap_bytes))
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._started, self._reported = 0, {}
        self._hooks = [p.register_post_accumulate_grad_hook(self._accumulated) for p in parameters]
        if self._overlap:
            self._hooks += [p.register_hook(partial(self._complete, p)) for p in self._bucket_of]

    def arrived(self, parameter: Parameter, gradient: Tensor) -> None:
        """Take this rank's gradient from the running backward, before autograd adds it to
        ``.grad``. Raises RuntimeError if a gradient of this parameter was taken already."""
        # Autograd sums the gradients of several forwards, and other hooks may change them.
        alone = self._forwards == 1 and len(parameter._backward_hooks or ()) == 1
        if self._overlap and not self._paused and alone and parameter in self._bucket_of:
            self._reported[parameter] = gradient.data_ptr(), gradient._version
            self._take(parameter, gradient)

    def _complete(self, parameter: Parameter, gradient: Tensor) -> None:
        """Hook: autograd has the complete gradient, and adds it to ``.grad`` next."""
        reported, now = self._reported.get(parameter), local(gradient)
        if reported is not None and (now.data_ptr(), now._version) != reported:
            raise RuntimeError(
                f"a parameter {tuple(parameter.shape)} has a gradient from outside of the module "
                "too, or from a backward that did not put it into .grad (torch.autograd.grad), but "
                "what the module found is being added up over ranks already; use the parameter "
                "within the module's forward, or use_async_reducer=False"
            )

    def _accumulated(self, parameter: Parameter) -> None:
        """Hook: autograd has put a gradient into ``.grad``."""
        if parameter not in self._new:
            self._new.add(parameter)
            self._warn_of_sums(parameter)
        if not self._overlap or parameter not in self._bucket_of:
            return
        self._forwards = 0
        if self._reported.pop(parameter, None) is not None:
            self._bucket_of[parameter].early.pop(parameter, None)
        elif not self._paused:
            self._take(parameter, None)

    def _warn_of_sums(self, parameter: Parameter) -> None:
        """Warn once if a backward has added to a gradient that was already summed over the ranks,
        and nothing else has changed that gradient in between."""
        summed, version = self._summed.get(parameter, (None, 0))
        grad = parameter.grad
        if self._warned or summed is None or grad is None or summed() is not grad:
            return
        if grad._version == version + 1:
            self._warned = True
            warnings.warn(
                "a backward has added to gradients that sync_grad() had added up over the ranks, "
                "and the next sync_grad() counts those sums once for each rank; call sync_grad() "
                "once, after the last backward of a step, and zero_grad() after the optimizer's",
                stacklevel=2,
            )

    def _take(self, parameter: Parameter, early: Tensor | None) -> None:
        bucket = self._bucket_of[parameter]
        if parameter not in bucket.missing:
            raise RuntimeError(
                "a second backward since the last sync_grad(): with use_async_reducer the "
                "first one's gradients are being added up already; call sync_grad() and "
                "zero_grad() after each, or run all backwards of a step but the last within "
                "no_sync()"
            )
        bucket.missing.discard(parameter)
        if early is not None:
            bucket.early[parameter] = early
        # In order, so that ranks whose backwards differ still start the same bucket next.
        while self._started < len(self._buckets) and not self._buckets[self._started].missing:
            self._buckets[self._started].start()
            self._started += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within this context, a backward starts no bucket."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def sync(self) -> None:
        """Sum the new gradients. Gradients that an earlier call summed are left out, and put back
        if no rank has a new one. A gradient that was put into ``.grad`` by hand is new."""
        if self._reported:
            raise RuntimeError(
                "a backward found gradients that it did not put into .grad (torch.autograd.grad, "
                "or backward(inputs=...)), and they are being added up over ranks: run it in "
                "no_sync()"
            )
        self._ran = False
        old = {
            p: p.grad
            for p, (summed, _) in self._summed.items()
            if p.grad is not None and p not in self._new and summed() is p.grad
        }
        for parameter in old:
            parameter.grad = None
        try:
            for bucket in self._buckets[self._started :]:
                bucket.start()
            for bucket in self._buckets:
                bucket.finish()
        finally:
            for parameter, grad in old.items():
                if parameter.grad is None:
                    parameter.grad = grad
        self._started = self._forwards = 0
        self._new.clear()
        self._summed = {
            p: (TensorWeakRef(p.grad), p.grad._version) for p in self._watched if p.grad is not None
        }


def local(x: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing its memory; any other tensor as it is."""
    x = x.detach()
    return x.to_local() if isinstance(x, DTensor) else x


def buckets(
    parameters: Sequence[Parameter], copies: dist.ProcessGroup | None, cap_bytes: float
) -> Iterator[Bucket]:
    """Buckets of parameters in this order, each of one dtype and group, up to ``cap_bytes``.

    Parameters that the plan cuts are left out if there is one copy: nothing is left to add up.
    """
    open_: dict[tuple[torch.dtype, bool], list[Parameter]] = {}
    sizes: dict[tuple[torch.dtype, bool], int] = {}
    for parameter in parameters:
        cut = bool(cut_axes(parameter))
        if cut and copies is None:
            continue
        key, nbytes = (parameter.dtype, cut), local(parameter).nbytes
        sizes[key] = sizes.get(key, 0) + nbytes
        if key in open_ and sizes[key] > cap_bytes:
            yield Bucket(open_.pop(key), copies if cut else None)
            sizes[key] = nbytes
        open_.setdefault(key, []).append(parameter)
    for (_, cut), rest in open_.items():
        yield Bucket(rest, copies if cut else None)
