"""``register_op``: one declaration, everything an engine needs.

    the function --+-- a torch.library op (fake and autograd; forward and backward each an op)
                   +-- its DTensor rule, which passes the group on where a split communicates
                   +-- an OpRecord: what engines read to find, split and cost the op

An op's arguments are tensors, numbers, strings and lists of numbers: a graph can hold no others.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import AnnotationError, Span
from ..grammar import Annotation, Reduce
from ..registry import (
    AnnotatedOp,
    AnnotationLike,
    OpRecord,
    add,
    annotated_ops,
    as_texts,
    check_reduced,
)
from ..rules import PartitionRule
from ..solving import reduces_of
from . import dtensor
from .define import define, implement


def register_op(
    annotation: AnnotationLike,
    *,
    name: str | None = None,
    title: str | None = None,
    rule: PartitionRule | None = None,
    differentiable: Sequence[str] | None = None,
    fake: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], AnnotatedOp]:
    """Declare an op: decorate the function that computes it on one rank's part.

    Args:
        annotation: e.g. ``"m k+, k+ n -> m n"``, one entry per leading argument; or a function from
            the op's arguments to the string, which may depend on tensors by shape and dtype alone
            because the string is cached. The strings of a tuple are alternatives: later ones allow
            splits that the first does not. The first must fit every call, also on parts: a
            shard-aware op's arguments choose the string.
        name: ``namespace::op``; by default ``seqshard::<function's name>``.
        title: the op's name in errors; by default the function's name.
        rule: partition behaviour beyond the annotation; by default no split communicates inside.
            :class:`~annotations.rules.Communicates` says which gradients the backward gets if a
            split does.
        differentiable: arguments that get gradients; by default every tensor argument.
        fake: shapes and dtypes of the results from the arguments; by default from the annotation,
            with the first tensor's dtype. Op calls are checked against the annotation either way.
        backward: ``backward(*grads, *arguments, *results)`` -> the gradients of ``differentiable``,
            in order, None for zeros; a grad is None if no gradient flows into that result. By
            default the function is run again and differentiated by autograd.
    Returns:
        A decorator; the decorated name becomes the op, with the function's own signature.

    Raises:
        ValueError: the op's name is taken or not ``namespace::op``, an argument is keyword-only, or
            ``differentiable`` names no argument.
        AnnotationSyntaxError: ``annotation`` does not parse.
        AnnotationError: ``annotation`` is no string, tuple of strings or function; or no call can
            fit it; or a dim that may be split is in no result and has no '+' and no rule.

    Example:
        >>> import torch
        >>> from annotations import register_op
        >>> @register_op("a b, b -> a b", name="docs::scale_columns")
        ... def scale_columns(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ...     return x * w
        >>> scale_columns(torch.ones(2, 3), torch.arange(3.0))
        tensor([[0., 1., 2.],
                [0., 1., 2.]])
    """
    texts = () if callable(annotation) else as_texts(annotation)
    splits = rule or PartitionRule()

    def decorate(function: Callable[..., Any]) -> AnnotatedOp:
        op_name, op_title = name or f"seqshard::{function.__name__}", title or function.__name__
        signature = inspect.signature(function, eval_str=True)
        if problem := _problem(op_name, signature, differentiable or ()):
            raise ValueError(f"register_op: {problem}")
        schema = torch.library.infer_schema(function, mutates_args=())
        n_outputs = schema.rpartition("->")[2].count("Tensor")
        for text in texts:
            parsed = Annotation.parse(text)
            _check_annotation(op_title, parsed, list(signature.parameters), n_outputs, splits)
        tensors = [p.name for p in signature.parameters.values() if _is_tensor(p.annotation)]
        with_gradients = tuple(tensors if differentiable is None else differentiable)
        # A derived backward runs the function again, so it does not need the results.
        saves_results = backward is not None
        ops = define(op_name, schema, n_outputs, len(with_gradients), saves_results)
        record = OpRecord(
            name=op_name,
            title=op_title,
            annotation=annotation,
            rule=splits,
            signature=signature,
            differentiable=with_gradients,
            n_outputs=n_outputs,
            saves_results=saves_results,
            fake=fake,
            forward=ops[0],
            backward=ops[1],
        )
        implement(record, function, backward)
        dtensor.install(record)
        op = AnnotatedOp(record, function)
        add(op)
        return op

    return decorate


def _problem(name: str, signature: inspect.Signature, differentiable: Sequence[str]) -> str:
    """Why a function cannot become the op ``name``; empty if it can."""
    if not re.fullmatch(r"\w+::\w+", name):
        return f"{name!r} is not a name such as 'mylib::myop'"
    for op in annotated_ops():
        if op.record.name == name:
            return f"{name} is registered already, by {_where(op)}"
    for parameter in signature.parameters.values():
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            return f"argument {str(parameter)!r} of {name} must be one that is passed by position"
    for argument in differentiable:
        if argument not in signature.parameters:
            return f"{name} has no argument {argument!r} to differentiate"
    return ""


def _where(op: AnnotatedOp) -> str:
    """File and line of the decorated function."""
    function: Any = op.__wrapped__  # type: ignore[attr-defined]
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)


def _is_tensor(annotation: Any) -> bool:
    return annotation is Tensor or annotation == Tensor | None or annotation is torch.nn.Parameter


def _check_annotation(
    title: str, annotation: Annotation, names: list[str], n_outputs: int, rule: PartitionRule
) -> None:
    """Refuse an annotation that no call can fit, or that allows a split that would be wrong.

    Args:
        names: of the function's arguments. n_outputs: tensors that it returns.
    """

    def error(problem: str, span: Span | None, expected: str) -> AnnotationError:
        return AnnotationError(problem, annotation.text, span, [f"expected: {expected}"], title)

    if len(annotation.inputs) > len(names):
        raise error(
            f"{len(annotation.inputs)} inputs, but the function has {len(names)} arguments",
            annotation.inputs[len(names)].span,
            f"at most one for each of {', '.join(names) or 'none'}",
        )
    if len(annotation.outputs) != n_outputs:
        raise error(
            f"{len(annotation.outputs)} outputs, but the function returns {n_outputs}",
            annotation.outputs[-1].span if annotation.outputs else None,
            "one output for each tensor that is returned",
        )
    inputs = reduces_of(annotation.inputs)
    for name in reduces_of(annotation.outputs):
        if name not in inputs and name not in ("?", "*") and not name.isdecimal():
            raise error(
                f"{name!r} is in no input, so its size is never known",
                annotation.span_of(name),
                "a name of an input, a size, or '?' as the output, with fake=",
            )
    check_reduced(title, annotation, rule)
    for name in rule.shard_aware:
        if inputs.get(name, Reduce.FROZEN) is Reduce.FROZEN:
            can = [
                repr(n) for n, reduce in inputs.items() if reduce is not Reduce.FROZEN and n != "*"
            ]
            raise error(
                f"the rule is for splits of {name!r}, which can never be split",
                annotation.span_of(name),
                f"rules for {', '.join(can) or 'nothing: no dim of it can be split'}",
            )
