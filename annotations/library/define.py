"""The ``torch.library`` side of a declaration: schema, kernels, fake, autograd.

The backward op's arguments are the gradients of the results (None where nothing flows), then the
forward's arguments, then its results:

    ring_attn(q, k, v, ...) -> (out, lse)
    ring_attn_backward(dout, dlse, q, k, v, ..., out, lse) -> (dq, dk, dv)

The results are left out if the backward is derived from the function. A forward may have a last
argument ``wanted: Sequence[bool] | None = None``, which callers leave alone: the backward op finds
in it which of the differentiable arguments need a gradient, and need not compute the others.

Compilers plan memory by the schema and the fake, so real results keep to both: no result is
another tensor's memory, and the results of an op without its own ``fake`` are contiguous.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..binding import BoundAnnotation
from ..errors import AnnotationError
from ..registry import OpRecord, as_tuple
from .autograd import WANTED, OpAutograd
from .cached_calls import cached
from .function_checks import check_results, watched

# A Library unregisters its ops when it is collected, so they are kept.
_libraries: dict[str, torch.library.Library] = {}


def define(
    name: str, schema: str, n_outputs: int, n_gradients: int, saves_results: bool
) -> tuple[Any, Any]:
    """Define the forward and the backward op of a name; :func:`implement` comes later."""
    namespace, op_name = name.split("::")
    lib = _libraries.setdefault(namespace, torch.library.Library(namespace, "FRAGMENT"))
    tags = (torch.Tag.pt2_compliant_tag,)
    lib.define(f"{op_name}{schema}", tags=tags)
    backward_schema = _backward_schema(schema, n_outputs, n_gradients, saves_results)
    lib.define(f"{op_name}_backward{backward_schema}", tags=tags)
    ops = getattr(torch.ops, namespace)
    return getattr(ops, op_name).default, getattr(ops, f"{op_name}_backward").default


def implement(
    record: OpRecord, function: Callable[..., Any], backward: Callable[..., Any] | None
) -> None:
    """Give a record's two ops their kernels, fakes and autograd.

    Args:
        function, backward: as for :func:`~annotations.register_op`.
    """
    lib = _libraries[record.name.split("::")[0]]
    forward_kernel = _implement_forward(lib, record, function)
    backward = backward or _derived_backward(function, record)
    OpAutograd(record, forward_kernel, _implement_backward(lib, record, backward)).register(lib)


def _backward_schema(schema: str, n_outputs: int, n_gradients: int, saves_results: bool) -> str:
    match = re.fullmatch(r"\((.*)\) -> .*", schema)
    assert match is not None, schema
    grads = [f"Tensor? grad_{n}" for n in range(n_outputs)]
    # A schema allows defaults only at its end; the backward op is called with all arguments.
    arguments = [re.sub(r"=.*$", "", a) for a in match[1].split(", ") if a not in ("", "*")]
    results = [f"Tensor result_{n}" for n in range(n_outputs)] if saves_results else []
    inputs = ", ".join(grads + arguments + results)
    return f"({inputs}) -> ({', '.join(['Tensor'] * n_gradients)})"


def _implement_forward(
    lib: torch.library.Library, record: OpRecord, function: Callable[..., Any]
) -> Callable[..., Any]:
    """Implement the forward op. Returns its kernel for tensors with data."""
    op_name = record.name.split("::")[1]
    first = True
    known: dict[Any, BoundAnnotation] = {}

    def kernel(*args: Any) -> Any:
        nonlocal first
        arguments = record.arguments(args, {})
        values = list(arguments.values())
        tensors = [values[n] for n in record.tensor_at]
        for n in record.tensor_at:
            if values[n] is not None:
                values[n] = values[n].shape, values[n].dtype
        bound = cached(known, tuple(values), lambda: record.bind(arguments))
        with watched(record, arguments) if first else nullcontext():
            returned = function(**arguments)
        first = False
        results = _own(as_tuple(returned), tensors, record.fake is None)
        check_results(record, bound, results)
        return _returned(results)

    def fake(*args: Any, **kwargs: Any) -> Any:
        return _returned(record.empty_results(record.arguments(args, kwargs)))

    lib.impl(op_name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(record.name, fake, lib=lib)
    return kernel


def _implement_backward(
    lib: torch.library.Library, record: OpRecord, backward: Callable[..., Any]
) -> Callable[..., tuple[Tensor | None, ...]]:
    """Implement the backward op. Returns its kernel for tensors with data, which gives None where
    no gradient is wanted."""

    def kernel(*args: Any) -> tuple[Tensor | None, ...]:
        wanted = _differentiated(record, args).values()
        grads = [
            None if value is None else value.new_zeros(value.shape) if grad is None else grad
            for grad, value in zip(as_tuple(backward(*args)), wanted, strict=True)
        ]
        n, last = record.n_outputs, record.n_outputs + len(record.signature.parameters)
        tensors = (*args[:n], *[args[n + at] for at in record.tensor_at], *args[last:])
        return _own(grads, tensors, contiguous=True)

    def real(*args: Any) -> Any:
        return _returned(tuple(_zeros(None, args) if x is None else x for x in kernel(*args)))

    def fake(*args: Any) -> Any:
        return _returned(tuple(_zeros(x, args) for x in _differentiated(record, args).values()))

    name = f"{record.name}_backward"
    lib.impl(name.split("::")[1], real, "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=lib)
    return kernel


def _returned(results: tuple[Any, ...]) -> Any:
    return results[0] if len(results) == 1 else results


def _named_inputs(record: OpRecord, args: tuple[Any, ...]) -> dict[str, Any]:
    """The forward's arguments by name, from the backward op's arguments."""
    names = record.signature.parameters
    return dict(zip(names, args[record.n_outputs :], strict=False))


def _differentiated(record: OpRecord, args: tuple[Any, ...]) -> dict[str, Any]:
    """The differentiable arguments, from the backward op's; None where no gradient is wanted."""
    inputs = _named_inputs(record, args)
    found = {name: inputs[name] for name in record.differentiable}
    if not inputs.get(WANTED):
        return found
    needs = zip(found, inputs[WANTED], strict=True)
    return {name: found[name] if need else None for name, need in needs}


def _zeros(value: Any, args: tuple[Any, ...]) -> Tensor:
    """A gradient of zeros for ``value``; a tensor of no size if no gradient is wanted."""
    if isinstance(value, Tensor):
        return value.new_zeros(value.shape)
    return next(arg for arg in args if isinstance(arg, Tensor)).new_empty(0)


def _own(results: Sequence[Any], given: Iterable[Tensor | None], contiguous: bool) -> Any:
    """``results``, copied where they share memory with ``given`` or with each other."""
    taken = {_memory(tensor) for tensor in given if tensor is not None}
    owned = []
    for result in results:
        if result is not None:
            result = result.contiguous() if contiguous else result
            if _memory(result) in taken:
                result = result.clone()
            taken.add(_memory(result))
        owned.append(result)
    return tuple(owned)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _derived_backward(
    function: Callable[..., Any], record: OpRecord
) -> Callable[..., tuple[Tensor | None, ...]]:
    """Run the function again under autograd and differentiate it.

    The backward raises AnnotationError if no result depends on an argument for autograd, for
    example after ``detach``.
    """

    def backward(*args: Any) -> tuple[Tensor | None, ...]:
        inputs = _named_inputs(record, args)
        leaves = {
            name: value.detach().requires_grad_()
            for name, value in _differentiated(record, args).items()
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
        }
        with autograd_on():
            results = as_tuple(function(**{**inputs, **leaves}))
            if not any(result.requires_grad for result in results):
                problem = f"no result depends on {', '.join(leaves)} for autograd"
                remedy = "expected: differentiable=() for no gradients, or a backward= of its own"
                raise AnnotationError(problem, details=[remedy], op=record.title)
            pairs = [
                (result, grad)
                for result, grad in zip(results, args[: record.n_outputs], strict=True)
                if grad is not None and result.requires_grad
            ]
            grads = torch.autograd.grad(
                [result for result, _ in pairs],
                list(leaves.values()),
                [grad for _, grad in pairs],
                materialize_grads=True,
            )
        by_name = dict(zip(leaves, grads, strict=True))
        return tuple(by_name.get(name) for name in record.differentiable)

    return backward


@contextmanager
def autograd_on() -> Iterator[None]:
    """Record gradients, also inside an op, where the dispatcher has left autograd behind."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradCPU", "AutogradCUDA", "AutogradOther", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield
