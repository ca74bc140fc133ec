"""The autograd side of a declaration: what an op's forward saves, and its backward op with that.

``torch.library.register_autograd`` would do, but adds 130 us to each call that needs a gradient, as
much as a kernel of some thousand tokens takes on a GPU. This is the same, made for ops whose
arguments are tensors, numbers and strings.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .registry import OpRecord

WANTED = "wanted"

# Where the dispatcher ends up for tensors with data, when no mode looks on.
_BACKENDS = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


def differentiate(
    lib: torch.library.Library,
    record: OpRecord,
    forward_function: Callable[..., Any],
    backward_function: Callable[..., Any],
) -> None:
    """Register the autograd of a record's two ops.

    Args:
        forward_function, backward_function: what the ops do to tensors with data; the second may
            return None where no gradient is wanted.
    """
    op_name = record.name.split("::")[1]
    defaults = [argument.default_value for argument in record.forward._schema.arguments]
    names, tensor_at = list(record.signature.parameters), record.tensor_at
    number_at = [n for n in range(len(names)) if n not in tensor_at]
    order = [(*tensor_at, *number_at).index(n) for n in range(len(names))]

    def forward(ctx: Any, keyset: Any, inputs: tuple[Any, ...], *tensors: Tensor | None) -> Any:
        plain = _is_backend(keyset)
        results = below(plain, keyset, inputs)
        ctx.set_materialize_grads(False)
        ctx.plain = plain
        ctx.numbers = [inputs[n] for n in number_at]
        ctx.save_for_backward(*tensors, *(_as_tuple(results) if record.saves_results else ()))
        return results

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if not record.differentiable or all(grad is None for grad in grads):
            return (None,) * (2 + len(tensor_at))
        saved = ctx.saved_tensors
        given = [*saved[: len(tensor_at)], *ctx.numbers]
        inputs = [given[n] for n in order]
        needs = {names[n]: ctx.needs_input_grad[2 + i] for i, n in enumerate(tensor_at)}
        if WANTED in names:
            inputs[names.index(WANTED)] = [needs[name] for name in record.differentiable]
        function = backward_function if ctx.plain and _is_plain(grads) else record.backward
        with nullcontext() if torch.is_grad_enabled() else torch._C._AutoDispatchBelowAutograd():
            results = function(*grads, *inputs, *saved[len(tensor_at) :])
        found = dict(zip(record.differentiable, _as_tuple(results), strict=True))
        return (None, None, *[found.get(name) if need else None for name, need in needs.items()])

    def below(plain: bool, keyset: Any, inputs: tuple[Any, ...]) -> Any:
        """The op below autograd: past the dispatcher where it would only come back here."""
        with torch._C._AutoDispatchBelowAutograd():
            if plain:
                return forward_function(*inputs)
            return record.forward.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)

    # In autograd's graph, and in profiles, a call goes by its op's name.
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    recorded: Any = type(op_name, (torch.autograd.Function,), methods)

    def autograd(keyset: Any, *inputs: Any) -> Any:
        if len(inputs) < len(names):  # the dispatcher leaves out what is at its default
            inputs += tuple(defaults[len(inputs) :])
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            # Its gradients go to tensors that are passed by themselves.
            return recorded.apply(keyset, inputs, *[inputs[n] for n in tensor_at])
        return below(_is_backend(keyset), keyset, inputs)

    lib.impl(op_name, autograd, "Autograd", with_keyset=True)
    if record.differentiable:  # without this, torch would take the gradients for constants
        _refuse_second(record)


def _is_backend(keyset: Any) -> bool:
    """Whether nothing but a backend's kernel is left of a call, once autograd is done."""
    left = keyset & torch._C._after_autograd_keyset
    left = left.remove(torch._C.DispatchKey.ADInplaceOrView)
    return left.highestPriorityTypeId() in _BACKENDS


def _is_plain(grads: tuple[Tensor | None, ...]) -> bool:
    """Whether these are tensors with data, with no mode looking on, and not to be differentiated
    again."""
    if torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack():
        return False
    return all(grad is None or _is_backend(torch._C._dispatch_keys(grad)) for grad in grads)


def _refuse_second(record: OpRecord) -> None:
    def backward_of_backward(ctx: Any, *grads: Any) -> None:
        raise NotImplementedError(f"{record.title}: second derivatives are not supported")

    torch.library.register_autograd(f"{record.name}_backward", backward_of_backward)


def _as_tuple(results: Any) -> tuple[Any, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)
