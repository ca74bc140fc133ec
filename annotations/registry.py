"""The registered ops: what is known of each, and how it is called.

:func:`annotations.register_op` adds an op; an engine finds it by :func:`record_of`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .binding import BoundAnnotation, bind
from .errors import AnnotationError
from .grammar import Annotation, Reduce
from .rules import Arguments, PartitionRule
from .solving import reduces_of

# Several strings are alternatives: the first is preferred, the others allow splits that it does
# not allow.
Texts = str | tuple[str, ...]
AnnotationLike = Texts | Callable[..., Texts]


@dataclass(frozen=True, eq=False)
class OpRecord:
    """A registered op.

    Attributes:
        name: ``namespace::op``, as in ``torch.ops``.
        title: the op's name in errors and plans; the public function's name where there is one.
        annotation: the string or the alternatives, or a function that makes them from the op's
            arguments.
        rule: partition behaviour.
        signature: of the forward function.
        differentiable: names of the arguments that get gradients.
        n_outputs: number of tensors that the forward returns.
        saves_results: whether the backward op takes the forward's results.
        fake: results without data from the arguments; None if the annotation gives the shapes.
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
        """Positions of the arguments that are tensors or optional tensors."""
        kinds = [str(argument.type) for argument in self.forward._schema.arguments]
        return tuple(n for n, kind in enumerate(kinds) if kind in ("Tensor", "Optional[Tensor]"))

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments of a call by name, with defaults."""
        names = self.signature.parameters
        if len(args) == len(names):
            return dict(zip(names, args, strict=True))
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def bind(self, arguments: Arguments) -> BoundAnnotation:
        """The annotation, or the first alternative, with a call's shapes.

        Raises:
            BindingError: the shapes do not fit the annotation.
            AnnotationError: the function that makes the annotation returned something else.
        """
        return self._bind(self._texts(arguments)[0], arguments)

    def bindings(self, arguments: Arguments) -> tuple[BoundAnnotation, ...]:
        """All alternatives with a call's shapes, the preferred first; raises as :meth:`bind`."""
        return tuple(self._bind(text, arguments) for text in self._texts(arguments))

    def empty_results(self, arguments: Arguments) -> tuple[Tensor, ...]:
        """Uninitialised results of the forward, on the device of the first tensor argument.

        Raises:
            BindingError: the shapes do not fit the annotation.
            AnnotationError: the annotation leaves a shape open and there is no ``fake``.
        """
        shapes = self.bind(arguments).output_shapes()
        if self.fake is not None:
            return as_tuple(self.fake(**arguments))
        if None in shapes:
            problem = f"the shape of output {shapes.index(None)} is '?': register_op needs fake="
            raise AnnotationError(problem, op=self.title)
        like = next(value for value in arguments.values() if isinstance(value, Tensor))
        return tuple(like.new_empty(shape) for shape in shapes if shape is not None)

    def _texts(self, arguments: Arguments) -> tuple[str, ...]:
        if not callable(self.annotation):
            return as_texts(self.annotation)
        try:
            texts = as_texts(self.annotation(**arguments))
        except AnnotationError as error:
            raise error.in_op(self.title) from None
        for text in texts:
            if text not in self._checked:
                check_reduced(self.title, Annotation.parse(text), self.rule)
                self._checked.add(text)
        return texts

    def _bind(self, text: str, arguments: Arguments) -> BoundAnnotation:
        names = tuple(self.signature.parameters)[: len(Annotation.parse(text).inputs)]
        shapes = tuple(
            tuple(value.shape) if isinstance(value := arguments[name], Tensor) else None
            for name in names
        )
        # Symbolic sizes, under torch.compile(dynamic=True), have no hash.
        symbolic = any(isinstance(n, torch.SymInt) for shape in shapes for n in shape or ())
        return (bind if symbolic else _cached_bind)(text, self.title, names, shapes)


_cached_bind = functools.lru_cache(maxsize=4096)(bind)


class AnnotatedOp:
    """A registered op, called like the function that was decorated.

    Attributes:
        record: what engines read.
    """

    def __init__(self, record: OpRecord, function: Callable[..., Any]) -> None:
        self.record = record
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.record.forward(*args, **kwargs)


_OPS: dict[Any, AnnotatedOp] = {}  # by the forward torch.library op, in order of registration


def add(op: AnnotatedOp) -> None:
    """Make an op known to engines."""
    _OPS[op.record.forward] = op


def record_of(op: Any) -> OpRecord | None:
    """The record of a ``torch.library`` op (the forward's overload); None if it is not ours."""
    annotated = _OPS.get(op)
    return None if annotated is None else annotated.record


def registered_ops() -> dict[str, OpRecord]:
    """All registered ops by name."""
    return {op.record.name: op.record for op in _OPS.values()}


def annotated_ops() -> tuple[AnnotatedOp, ...]:
    """All registered ops as they are called, in order of registration."""
    return tuple(_OPS.values())


def check_reduced(title: str, annotation: Annotation, rule: PartitionRule) -> None:
    """Refuse a dim that may be split but is in no result, not marked '+', and without a rule: each
    rank's result would be that of its part alone.

    Raises:
        AnnotationError: says how to mark it.
    """
    if any(shape.ignored for shape in annotation.outputs):
        return  # a result of any shape may contain it
    settled = {*reduces_of(annotation.outputs), *rule.shard_aware, "*"}
    for name, reduce in reduces_of(annotation.inputs).items():
        if reduce is Reduce.SPLIT and name not in settled:
            expected = (
                f"expected: '{name}+' if results are then sums to be added up, '{name}^' if it is "
                "never to be split, or a rule for it"
            )
            raise AnnotationError(
                f"{name!r} is in no output, and a split of it would go unnoticed",
                annotation.text,
                annotation.span_of(name),
                [expected],
                title,
            )


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
        Annotation.parse(text)
    return texts


def as_tuple(results: Any) -> tuple[Any, ...]:
    """What a function returned, as a tuple even if it is one tensor."""
    return (results,) if isinstance(results, Tensor) else tuple(results)
