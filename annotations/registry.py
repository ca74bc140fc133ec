"""One declaration, everything an engine needs.

``register_op`` turns a function and its annotation into

    the function --+-- a torch.library op (fake and autograd; forward and backward each an op)
                   +-- its DTensor rule, which passes the group on where a split communicates
                   +-- an OpRecord: what engines read to find, split and cost the op

An op's arguments are tensors, numbers, strings and lists of numbers: that is all a graph can hold.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .binding import BoundAnnotation, bind
from .declaration import check_declaration, check_reduced
from .errors import AnnotationError
from .grammar import Annotation
from .rules import PartitionRule

# Several strings are alternatives: the first is preferred, the others stand for splits that it
# cannot be cut into.
Texts = str | tuple[str, ...]
AnnotationLike = Texts | Callable[..., Texts]

_OPS: dict[Any, OpRecord] = {}
_CALLABLE: list[AnnotatedOp] = []


@dataclass(frozen=True, eq=False)
class OpRecord:
    """A registered op.

    Attributes:
        name: ``namespace::op``, as torch.ops knows it.
        title: what errors and plans call it; the public function's name where there is one.
        annotation: the string or the alternatives, or what makes them from the op's arguments.
        rule: partition behaviour.
        signature: of the forward function.
        differentiable: names of the arguments that get gradients.
        n_outputs: number of tensors that the forward returns.
        saves_results: whether the backward op is given the forward's results.
        fake: results without data from the arguments; None where the annotation tells them.
        forward, backward: the two ``torch.library`` ops.
    """

    name: str
    title: str
    annotation: AnnotationLike
    rule: PartitionRule
    signature: inspect.Signature
    differentiable: tuple[str, ...]
    n_outputs: int
    saves_results: bool
    fake: Callable[..., Any] | None
    forward: Any
    backward: Any
    _checked: set[str] = field(default_factory=set, repr=False)

    @cached_property
    def tensor_at(self) -> tuple[int, ...]:
        """Where the arguments that are tensors, or may be, stand."""
        kinds = [str(argument.type) for argument in self.forward._schema.arguments]
        return tuple(n for n, kind in enumerate(kinds) if kind in ("Tensor", "Optional[Tensor]"))

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments of a call by name, defaults filled in."""
        names = self.signature.parameters
        if len(args) == len(names):
            return dict(zip(names, args, strict=True))
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def bind(self, arguments: Mapping[str, Any]) -> BoundAnnotation:
        """The annotation over a call's shapes: the first, of alternatives.

        Raises:
            BindingError: the shapes do not fit the annotation.
            AnnotationError: what makes the annotation from the arguments made none.
        """
        return self._bind(self._texts(arguments)[0], arguments)

    def bindings(self, arguments: Mapping[str, Any]) -> tuple[BoundAnnotation, ...]:
        """All alternatives over a call's shapes, the preferred first.

        Raises:
            BindingError: the shapes do not fit one of them.
            AnnotationError: what makes the annotation from the arguments made none.
        """
        return tuple(self._bind(text, arguments) for text in self._texts(arguments))

    def empty_results(self, arguments: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Tensors as the forward returns, with no values, on the device of the first argument.

        Raises:
            BindingError: the shapes do not fit the annotation.
            AnnotationError: the annotation leaves a shape open and there is no ``fake``.
        """
        shapes = self.bind(arguments).output_shapes()
        if self.fake is not None:
            results = self.fake(**arguments)
            return (results,) if isinstance(results, Tensor) else tuple(results)
        if None in shapes:
            problem = f"the shape of output {shapes.index(None)} is '?': register_op needs fake="
            raise AnnotationError(problem, op=self.title)
        like = next(value for value in arguments.values() if isinstance(value, Tensor))
        return tuple(like.new_empty(shape) for shape in shapes if shape is not None)

    def _texts(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        given = self.annotation
        if not callable(given):
            return as_texts(given)
        try:
            texts = as_texts(given(**arguments))
        except AnnotationError as error:
            raise error.in_op(self.title) from None
        for text in texts:
            if text not in self._checked:
                check_reduced(self.title, Annotation.parse(text), self.rule)
                self._checked.add(text)
        return texts

    def _bind(self, text: str, arguments: Mapping[str, Any]) -> BoundAnnotation:
        names = tuple(self.signature.parameters)
        shapes = tuple(
            tuple(value.shape) if isinstance(value := arguments[name], Tensor) else None
            for name in names[: _n_inputs(text)]
        )
        # Symbolic sizes, under torch.compile(dynamic=True), have no hash.
        once = bind if _symbolic(shapes) else _bind
        return once(text, self.title, names[: len(shapes)], shapes)


def as_texts(annotation: Texts) -> tuple[str, ...]:
    """The alternatives of an annotation, the preferred first.

    Raises:
        AnnotationError: it is neither a string nor a tuple of strings.
        AnnotationSyntaxError: one of them does not parse.
    """
    texts = (annotation,) if isinstance(annotation, str) else annotation
    if not (isinstance(texts, tuple) and texts and all(isinstance(t, str) for t in texts)):
        raise AnnotationError(
            f"an annotation must be a string or a tuple of strings, got {annotation!r}"
        )
    for text in texts:
        _n_inputs(text)
    return texts


@functools.lru_cache(maxsize=4096)
def _bind(
    text: str, title: str, names: tuple[str, ...], shapes: tuple[tuple[int, ...] | None, ...]
) -> BoundAnnotation:
    return bind(text, title, names, shapes)


def _symbolic(shapes: tuple[tuple[int, ...] | None, ...]) -> bool:
    return any(isinstance(size, torch.SymInt) for shape in shapes for size in shape or ())


@functools.lru_cache(maxsize=4096)
def _n_inputs(text: str) -> int:
    return len(Annotation.parse(text).inputs)


class AnnotatedOp:
    """A registered op, to be called like the function it was declared with.

    Attributes:
        record: what engines read.
        again: the op for calls that are alike, from a :class:`~.gradients.Repeat` and the tensor
            arguments to the results; only where :func:`~.plain.goes_straight`.
    """

    def __init__(
        self, record: OpRecord, function: Callable[..., Any], again: Callable[..., Any]
    ) -> None:
        self.record, self.again = record, again
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.record.forward(*args, **kwargs)


def record_of(op: Any) -> OpRecord | None:
    """The record of a ``torch.library`` op (the overload, forward or not), None if not ours."""
    return _OPS.get(op)


def registered_ops() -> dict[str, OpRecord]:
    """All registered ops by name."""
    return {record.name: record for record in _OPS.values()}


def annotated_ops() -> tuple[AnnotatedOp, ...]:
    """All registered ops as they are called, in order of registration."""
    return tuple(_CALLABLE)


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
            the op's arguments to the string, of tensors by shape and dtype alone: it is not asked
            again for a call alike. A tuple of strings are alternatives: later ones allow
            splits that the first cannot be cut into. The first must fit every call, also on parts:
            where an op is told that it has a part, its arguments choose the string.
        name: ``namespace::op``; by default ``seqshard::<function's name>``.
        title: what errors call the op; by default the function's name.
        rule: partition behaviour beyond the annotation; by default no split communicates inside.
            Where one does, a rank's backward is given 1 / parts of the gradient of a result that
            the split leaves whole, unless its :class:`~.rules.Communicates` says
            ``whole_gradients``.
        differentiable: arguments that get gradients; by default every tensor argument.
        fake: shapes and dtypes of the results from the arguments; by default from the annotation,
            with the first tensor's dtype. Op calls are checked against the annotation either way.
        backward: ``backward(*grads, *arguments, *results)`` -> the gradients of ``differentiable``,
            in order, None for zeros; a grad is None where nothing flows. By default the function is
            run again and differentiated by autograd.
    Returns:
        A decorator; the decorated name becomes the op, with the function's own signature.

    Raises:
        ValueError: the op's name is taken or not ``namespace::op``, an argument is keyword-only, or
            ``differentiable`` names what is no argument.
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
    if not callable(annotation):
        as_texts(annotation)

    def decorate(function: Callable[..., Any]) -> AnnotatedOp:
        from .library import dtensor
        from .library.define import define

        signature = inspect.signature(function, eval_str=True)
        tensors = [p.name for p in signature.parameters.values() if _is_tensor(p.annotation)]
        qualified = name or f"seqshard::{function.__name__}"
        problem = _problem(qualified, signature, differentiable or ())
        if problem:
            raise ValueError(f"register_op: {problem}")
        called, splits = title or function.__name__, rule or PartitionRule()
        schema = torch.library.infer_schema(function, mutates_args=())
        for text in () if callable(annotation) else as_texts(annotation):
            n_outputs = schema.rpartition("->")[2].count("Tensor")
            parsed = Annotation.parse(text)
            check_declaration(called, parsed, signature.parameters, n_outputs, splits)
        record, again = define(
            function,
            name=qualified,
            title=called,
            annotation=annotation,
            rule=splits,
            signature=signature,
            differentiable=tuple(tensors if differentiable is None else differentiable),
            fake=fake,
            backward=backward,
        )
        _OPS[record.forward] = record
        dtensor.install(record)

        op = AnnotatedOp(record, function, again)
        _CALLABLE.append(op)
        return op

    return decorate


def _problem(name: str, signature: inspect.Signature, differentiable: Sequence[str]) -> str:
    """What keeps a function from becoming the op ``name``; empty if nothing does."""
    if not re.fullmatch(r"\w+::\w+", name):
        return f"{name!r} is not a name such as 'mylib::myop'"
    if name in registered_ops():
        return f"{name} is registered already, by {_where(registered_ops()[name])}"
    for parameter in signature.parameters.values():
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            return f"argument {str(parameter)!r} of {name} must be one that is passed by position"
    for argument in differentiable:
        if argument not in signature.parameters:
            return f"{name} has no argument {argument!r} to differentiate"
    return ""


def _where(record: OpRecord) -> str:
    """File and line of the function that was declared."""
    op: Any = next(op for op in _CALLABLE if op.record is record)
    code = getattr(op.__wrapped__, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(op.__wrapped__)


def _is_tensor(annotation: Any) -> bool:
    return annotation is Tensor or annotation == Tensor | None or annotation is torch.nn.Parameter
