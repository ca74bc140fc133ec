"""The autograd side of a declaration: what an op's forward saves, and its backward op with that.

``torch.library.register_autograd`` would do, but adds 130 us to each call that needs a gradient, as
much as a kernel of some thousand tokens takes on a GPU. This is the same, made for ops whose
arguments are tensors, numbers and strings.

Calls that are alike again and again may pass by the dispatcher too (:class:`Repeat`): where nobody
looks on (:mod:`.plain`), all it would do is to come back here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..registry import OpRecord
from .bypass import only_backend, plain_gradients

WANTED = "wanted"

# The gradients of what a recorded call is given before its tensors.
_NOTHING = (None,) * 4


@dataclass(frozen=True, eq=False, slots=True)
class Repeat:
    """What an op does in calls that differ in nothing but what is in their tensors.

    Attributes:
        numbers: the arguments that are no tensors, in order.
        forward: from the tensor arguments to the results; each is memory of its own.
        backward: from the results' gradients, the tensor arguments and the results to the gradients
            of the differentiable arguments.
    """

    numbers: list[Any]
    forward: Callable[..., Any]
    backward: Callable[..., tuple[Tensor | None, ...]]


def differentiate(
    lib: torch.library.Library,
    record: OpRecord,
    forward_function: Callable[..., Any],
    backward_function: Callable[..., Any],
) -> Callable[..., Any]:
    """Register the autograd of a record's two ops.

    Args:
        forward_function, backward_function: what the ops do to tensors with data; the second may
            return None where no gradient is wanted.
    Returns:
        the op for calls that are alike, from a :class:`Repeat` and the tensor arguments to the
        results; only where :func:`~.plain.goes_straight`.
    """
    op_name = record.name.split("::")[1]
    defaults = [argument.default_value for argument in record.forward._schema.arguments]
    names, tensor_at = list(record.signature.parameters), record.tensor_at
    number_at = [n for n in range(len(names)) if n not in tensor_at]
    order = [(*tensor_at, *number_at).index(n) for n in range(len(names))]
    by_name = {name: n for n, name in enumerate(record.differentiable)}
    gradient_at = [by_name.get(names[n]) for n in tensor_at]

    def forward(
        ctx: Any,
        run: Callable[..., Any],
        numbers: list[Any],
        plain: bool,
        repeat: Repeat | None,
        *tensors: Tensor | None,
    ) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            results = run(*tensors)
        ctx.set_materialize_grads(False)
        ctx.numbers, ctx.plain, ctx.repeat = numbers, plain, repeat
        ctx.save_for_backward(*tensors, *(_as_tuple(results) if record.saves_results else ()))
        return results

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if not record.differentiable or all(grad is None for grad in grads):
            return (None,) * (4 + len(tensor_at))
        saved, plain = ctx.saved_tensors, ctx.plain and plain_gradients(grads)
        if plain and ctx.repeat is not None:
            with torch._C._AutoDispatchBelowAutograd():
                found = ctx.repeat.backward(*grads, *saved)
            return (*_NOTHING, *[None if n is None else found[n] for n in gradient_at])
        given = [*saved[: len(tensor_at)], *ctx.numbers]
        inputs = [given[n] for n in order]
        needs = {names[n]: ctx.needs_input_grad[4 + i] for i, n in enumerate(tensor_at)}
        if WANTED in names:
            inputs[names.index(WANTED)] = [needs[name] for name in record.differentiable]
        function = backward_function if plain else record.backward
        with nullcontext() if torch.is_grad_enabled() else torch._C._AutoDispatchBelowAutograd():
            results = function(*grads, *inputs, *saved[len(tensor_at) :])
        named = dict(zip(record.differentiable, _as_tuple(results), strict=True))
        return (*_NOTHING, *[named.get(name) if need else None for name, need in needs.items()])

    def below(plain: bool, keyset: Any, inputs: tuple[Any, ...]) -> Any:
        """The op below autograd: past the dispatcher where it would only come back here."""
        if plain:
            return forward_function(*inputs)
        return record.forward.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)

    # In autograd's graph, and in profiles, a call goes by its op's name.
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    recorded: Any = type(op_name, (torch.autograd.Function,), methods)
    # What ``recorded.apply`` does where no transform of functorch is at work, 10 us sooner.
    apply_plain = super(torch.autograd.Function, recorded).apply

    def autograd(keyset: Any, *inputs: Any) -> Any:
        if len(inputs) < len(names):  # the dispatcher leaves out what is at its default
            inputs += tuple(defaults[len(inputs) :])
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            # Its gradients go to tensors that are passed by themselves.
            plain = only_backend(keyset)
            run = lambda *_: below(plain, keyset, inputs)  # noqa: E731
            numbers, tensors = [inputs[n] for n in number_at], [inputs[n] for n in tensor_at]
            apply = apply_plain if plain else recorded.apply
            return apply(run, numbers, plain, None, *tensors)
        with torch._C._AutoDispatchBelowAutograd():
            return below(only_backend(keyset), keyset, inputs)

    def again(repeat: Repeat, *tensors: Tensor | None) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
            return apply_plain(repeat.forward, repeat.numbers, True, repeat, *tensors)
        with torch._C._AutoDispatchBelowAutograd():
            return repeat.forward(*tensors)

    lib.impl(op_name, autograd, "Autograd", with_keyset=True)
    if record.differentiable:  # without this, torch would take the gradients for constants
        _refuse_second(record)
    return again


def _refuse_second(record: OpRecord) -> None:
    def backward_of_backward(ctx: Any, *grads: Any) -> None:
        raise NotImplementedError(f"{record.title}: second derivatives are not supported")

    torch.library.register_autograd(f"{record.name}_backward", backward_of_backward)


def _as_tuple(results: Any) -> tuple[Any, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)
