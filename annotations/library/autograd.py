"""The autograd side of a declaration: what an op's forward saves, and its backward op with that.

``torch.library.register_autograd`` would do, but adds 130 us to each call that needs a gradient, as
much as a kernel of some thousand tokens takes on a GPU. This is the same, made for ops whose
arguments are tensors, numbers and strings.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..registry import OpRecord, as_tuple
from .bypass import gradients_can_bypass, only_backend

WANTED = "wanted"


class Recorder(NamedTuple):
    """How autograd records a call: ``apply(run, gradients, saves_results, *tensors)``, which
    returns ``run(tensors)``.

    Attributes:
        apply: ``gradients(grads, saved, needed)`` gives the gradients of ``tensors``. It finds in
            ``saved`` the tensors, and the results if these are saved.
        fast_apply: the same without functorch's transforms, 10 us faster.
    """

    apply: Callable[..., Any]
    fast_apply: Callable[..., Any]


@cache
def recorder(name: str) -> Recorder:
    """The recorder of an op's calls, which have its name in autograd's graph and in profiles."""
    methods = {"forward": staticmethod(_forward), "backward": staticmethod(_backward)}
    function: Any = type(name.split("::")[1], (torch.autograd.Function,), methods)
    return Recorder(function.apply, super(torch.autograd.Function, function).apply)  # type: ignore[misc]


def _forward(
    ctx: Any,
    run: Callable[[tuple[Tensor | None, ...]], Any],
    gradients: Callable[..., Any],
    saves_results: bool,
    *tensors: Tensor | None,
) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        results = run(tensors)
    ctx.set_materialize_grads(False)
    ctx.gradients = gradients
    if saves_results:
        tensors += results if type(results) is tuple else (results,)
    ctx.save_for_backward(*tensors)
    return results


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    needed = ctx.needs_input_grad[3:]
    if all(grad is None for grad in grads):
        return (None, None, None, *[None] * len(needed))
    saved = ctx.saved_tensors  # a checkpoint computes them here, with autograd
    with nullcontext() if torch.is_grad_enabled() else torch._C._AutoDispatchBelowAutograd():
        return (None, None, None, *ctx.gradients(grads, saved, needed))


class OpAutograd:
    """The autograd of a record's two ops; :meth:`register` registers it with ``torch.library``.

    Args:
        forward_kernel, backward_kernel: what the ops do to tensors with data; the second may return
            None where no gradient is wanted.
    """

    def __init__(
        self,
        record: OpRecord,
        forward_kernel: Callable[..., Any],
        backward_kernel: Callable[..., Any],
    ) -> None:
        self.record = record
        self.forward_kernel, self.backward_kernel = forward_kernel, backward_kernel
        self.defaults = [a.default_value for a in record.forward._schema.arguments]
        self.names, self.tensor_at = list(record.signature.parameters), record.tensor_at
        self.number_at = [n for n in range(len(self.names)) if n not in self.tensor_at]
        # Position of each argument in (*tensors, *numbers).
        self.order = [(*self.tensor_at, *self.number_at).index(n) for n in range(len(self.names))]
        self.tensor_names = [self.names[n] for n in self.tensor_at]
        self.recorder = recorder(record.name)

    def register(self, lib: torch.library.Library) -> None:
        """Register with ``torch.library``."""
        lib.impl(self.record.name.split("::")[1], self._call, "Autograd", with_keyset=True)
        if self.record.differentiable:  # otherwise torch would take the gradients for constants
            _refuse_second(self.record)

    def _call(self, keyset: Any, *inputs: Any) -> Any:
        if len(inputs) < len(self.names):  # the dispatcher leaves out arguments at their defaults
            inputs += tuple(self.defaults[len(inputs) :])
        bypass = only_backend(keyset)

        def below_autograd(_: Any = None) -> Any:
            if bypass:
                return self.forward_kernel(*inputs)
            keys = keyset & torch._C._after_autograd_keyset
            return self.record.forward.redispatch(keys, *inputs)

        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            # Gradients go to the tensors, so these are passed one by one.
            tensors = [inputs[n] for n in self.tensor_at]
            numbers = [inputs[n] for n in self.number_at]
            apply = self.recorder.fast_apply if bypass else self.recorder.apply
            gradients = partial(self._gradients, numbers, bypass)
            return apply(below_autograd, gradients, self.record.saves_results, *tensors)
        with torch._C._AutoDispatchBelowAutograd():
            return below_autograd()

    def _gradients(
        self,
        numbers: list[Any],
        bypass: bool,
        grads: tuple[Tensor | None, ...],
        saved: tuple[Tensor | None, ...],
        needed: tuple[bool, ...],
    ) -> list[Tensor | None]:
        """Gradients of the tensor arguments, by the backward op."""
        n_tensors = len(self.tensor_at)
        if not self.record.differentiable:
            return [None] * n_tensors
        given = [*saved[:n_tensors], *numbers]
        inputs = [given[n] for n in self.order]
        needs = dict(zip(self.tensor_names, needed, strict=True))
        if WANTED in self.names:
            inputs[self.names.index(WANTED)] = [needs[n] for n in self.record.differentiable]
        bypass = bypass and gradients_can_bypass(grads)
        kernel = self.backward_kernel if bypass else self.record.backward
        results = kernel(*grads, *inputs, *saved[n_tensors:])
        named = dict(zip(self.record.differentiable, as_tuple(results), strict=True))
        return [named.get(name) if need else None for name, need in needs.items()]


def _refuse_second(record: OpRecord) -> None:
    def backward_of_backward(ctx: Any, *grads: Any) -> None:
        raise NotImplementedError(f"{record.title}: second derivatives are not supported")

    torch.library.register_autograd(f"{record.name}_backward", backward_of_backward)
