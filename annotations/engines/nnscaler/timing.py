"""What nnscaler runs to trace a call without data, and to time a part on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from nnscaler.ir.cten import IRTensor
from torch import Tensor

from annotations.codegen.public_call import PublicCall

from .graph_values import restored, traced


def fake_of(call: PublicCall) -> Callable[..., Any]:
    """A function that returns results of the call's shapes and computes nothing."""

    def fake(*args: Any, **kwargs: Any) -> Any:
        bound = call.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        record, given = call.op_call(bound.arguments)
        results = record.empty_results(given)
        differentiable = (given[name] for name in record.differentiable)
        requires_grad = any(isinstance(x, Tensor) and x.requires_grad for x in differentiable)
        for result in results:
            if result.is_floating_point():  # without this nnscaler would leave the backward out
                result.requires_grad_(requires_grad)
            else:  # nnscaler runs the next op on it, which may take it for indices
                result.zero_()
        results = results[: call.outputs(bound.arguments)]
        return results if len(results) > 1 else results[0]

    return fake


def timed(*inputs: Any, **as_in_code: Any) -> Any:
    """What nnscaler runs to time any op, with :func:`example_inputs`."""
    *given, call = inputs
    return call(*given)


def _by_name(
    function: Callable[..., Any], names: Sequence[str], others: Mapping[str, Any], *given: Any
) -> Any:
    """Call a function with ``given`` as the arguments of these names."""
    return function(**dict(zip(names, given, strict=True)), **others)


def example_inputs(node: Any) -> tuple[Any, ...]:
    """Arguments to time a part with (an :class:`~.op_node.OpNode`): its inputs in order, then what
    is called with them.

    The time excludes communication: one device has no peers, and most of it overlaps with kernels.
    """
    call, device = node.call, torch.cuda.current_device()

    def example(value: Any) -> Any:
        if not isinstance(value, IRTensor):
            return restored(traced(value))
        shape, dtype = tuple(value.shape), value.dtype
        if not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.randn(shape, dtype=dtype, device=device, requires_grad=value.requires_grad)

    arguments = {name: example(value) for name, value in node.arguments().items()}
    sites = node.sites()
    for site in sites:
        arguments |= {n: v for n, v in call.arguments(site).items() if n in arguments}
    if call.fake_peers is not None:
        arguments |= call.fake_peers(arguments, sites)
    rest = {name: value for name, value in arguments.items() if name not in node.names}
    timed_call = partial(_by_name, call.function, node.names, rest)
    return *(arguments[name] for name in node.names), timed_call
