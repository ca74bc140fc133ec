"""The autograd side of an op: what its forward saves, and its backward op with that.

``torch.library.register_autograd`` would do, but adds 130 us to each call that needs a gradient, as
much as a kernel of some thousand tokens takes on a GPU. This is the same, made for ops whose
arguments are tensors, numbers and strings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..registry import OpRecord, as_tuple
from .bypass import gradients_can_bypass, only_backend

WANTED = "wanted"

MaybeTensors = Sequence[Tensor | None]


class AutogradCalls(NamedTuple):
    """Two ways to call an autograd function with ``(call, *tensors)``.

    Attributes:
        apply: also for functorch's transforms.
        fast_apply: what ``apply`` does without such a transform, 10 us sooner.
    """

    apply: Callable[..., Any]
    fast_apply: Callable[..., Any]


def autograd_calls(
    op_name: str,
    forward: Callable[[Any, MaybeTensors], Any],
    backward: Callable[[Any, MaybeTensors, MaybeTensors, Sequence[bool]], MaybeTensors],
    saves_results: bool = True,
) -> AutogradCalls:
    """The autograd function of an op, which autograd's graph and profiles show by the op's name.

    Args:
        forward: ``forward(call, tensors)`` -> a result or a tuple of them. Like ``backward`` it
            runs below autograd. ``call`` is kept for the backward, so it must hold no tensor.
        backward: ``backward(call, grads, saved, needs)`` -> the gradient of each tensor. ``saved``
            are the tensors, then the results; ``needs`` says which tensors need a gradient. It is
            not called where no gradient flows.
        saves_results: whether results are among ``saved``.
    """

    def run_forward(ctx: Any, call: Any, *tensors: Tensor | None) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            results = forward(call, tensors)
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(*tensors, *(as_tuple(results) if saves_results else ()))
        return results

    def run_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        if all(grad is None for grad in grads):
            return (None,) * len(needs)
        # A backward that is to be differentiated again is recorded: the backward op refuses it.
        with nullcontext() if torch.is_grad_enabled() else torch._C._AutoDispatchBelowAutograd():
            return None, *backward(ctx.call, grads, ctx.saved_tensors, needs[1:])

    methods = {"forward": staticmethod(run_forward), "backward": staticmethod(run_backward)}
    function: Any = type(op_name, (torch.autograd.Function,), methods)
    fast_apply = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return AutogradCalls(function.apply, fast_apply)


class _Call(NamedTuple):
    """A call but for its tensors: dispatch keys, whether only kernels are left to run, numbers."""

    keyset: Any
    bypass: bool
    numbers: Sequence[Any]


class OpAutograd:
    """The autograd of a record's two ops; :meth:`register` makes it that of ``torch.library``.

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
        self.op_name = record.name.split("::")[1]
        self.recorded = autograd_calls(
            self.op_name, self._forward, self._backward, record.saves_results
        )

    def register(self, lib: torch.library.Library) -> None:
        """Register with ``torch.library``."""
        lib.impl(self.op_name, self._call, "Autograd", with_keyset=True)
        if self.record.differentiable:  # otherwise torch would take the gradients for constants
            _refuse_second(self.record)

    def _call(self, keyset: Any, *inputs: Any) -> Any:
        if len(inputs) < len(self.names):  # the dispatcher leaves out arguments at their defaults
            inputs += tuple(self.defaults[len(inputs) :])
        call = _Call(keyset, only_backend(keyset), [inputs[n] for n in self.number_at])
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            # Gradients go to the tensors, so these are passed one by one.
            apply = self.recorded.fast_apply if call.bypass else self.recorded.apply
            return apply(call, *[inputs[n] for n in self.tensor_at])
        with torch._C._AutoDispatchBelowAutograd():
            return self._below_autograd(call, inputs)

    def _below_autograd(self, call: _Call, inputs: Sequence[Any]) -> Any:
        if call.bypass:
            return self.forward_kernel(*inputs)
        keys = call.keyset & torch._C._after_autograd_keyset
        return self.record.forward.redispatch(keys, *inputs)

    def _inputs(self, call: _Call, tensors: MaybeTensors) -> list[Any]:
        given = [*tensors, *call.numbers]
        return [given[n] for n in self.order]

    def _forward(self, call: _Call, tensors: MaybeTensors) -> Any:
        return self._below_autograd(call, self._inputs(call, tensors))

    def _backward(
        self, call: _Call, grads: MaybeTensors, saved: MaybeTensors, needs: Sequence[bool]
    ) -> MaybeTensors:
        differentiable, n_tensors = self.record.differentiable, len(self.tensor_at)
        if not differentiable:
            return [None] * n_tensors
        inputs = self._inputs(call, saved[:n_tensors])
        needed = dict(zip(self.tensor_names, needs, strict=True))
        if WANTED in self.names:
            inputs[self.names.index(WANTED)] = [needed[name] for name in differentiable]
        bypass = call.bypass and gradients_can_bypass(grads)
        kernel = self.backward_kernel if bypass else self.record.backward
        results = as_tuple(kernel(*grads, *inputs, *saved[n_tensors:]))
        named = dict(zip(differentiable, results, strict=True))
        return [named.get(name) if need else None for name, need in needed.items()]


def _refuse_second(record: OpRecord) -> None:
    def backward_of_backward(ctx: Any, *grads: Any) -> None:
        raise NotImplementedError(f"{record.title}: second derivatives are not supported")

    torch.library.register_autograd(f"{record.name}_backward", backward_of_backward)
